"""House lab: simulator, planner and step model. Installed with the extra `lab`."""

"""House lab: simulator, planner and step model; extra `lab`."""

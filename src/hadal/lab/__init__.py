"""Simulator, planner and step model. `hadal simulate` needs the extra `lab`."""

"""Simulation around the roles (load, disk cache, demand, faults), replay of recorded runs, and the
planner's search. Serving decisions are made by the roles, not here.

No module reads a file, a clock or a source of randomness: the caller passes in texts, times and
random generators.
"""

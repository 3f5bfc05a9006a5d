"""A world for the serving roles: made-up time, units with priced steps, faults, what was seen."""

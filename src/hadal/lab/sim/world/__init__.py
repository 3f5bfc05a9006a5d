"""Simulated world for the serving roles: time, units with priced steps, faults, and records."""

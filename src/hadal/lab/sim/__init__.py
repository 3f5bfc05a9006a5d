"""Simulation around the roles: load, disk cache, demand, faults. Makes no decision of serving.

No module reads a file, a clock or a source of randomness: the caller passes in texts, times and
random generators.
"""

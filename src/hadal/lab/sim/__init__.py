"""The world that the roles run in when nothing is real: load, disk cache, demand, faults. Decides
nothing that serves.

Nothing here reads a file, a clock or a source of randomness: texts, times and generators are passed
in.
"""

"""Connects: processes, sockets, shared memory, real time. Hosts the roles, applies their effects,
decides nothing.
"""

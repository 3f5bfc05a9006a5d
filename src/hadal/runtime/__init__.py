"""Connections to the real world: processes, sockets, shared memory and real time. Hosts the roles
and applies their effects; makes no decisions.
"""

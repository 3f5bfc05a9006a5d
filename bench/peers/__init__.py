"""The other engines on the same model and machine, each driven in its own process and
environment.
"""

"""Schedules as values: in which order a layer's ops run, and what travels while something else is
computed.
"""

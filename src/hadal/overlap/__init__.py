"""Schedules as values: the order of a layer's ops, with the exchanges that overlap with
computation.
"""

"""Benchmarks: one per path, each printing the peer or the limit beside the figure. Imports nothing
heavy by itself.
"""

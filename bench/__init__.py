"""Benchmarks: one for each path. Each prints the peer or the limit beside the figure. This package
imports nothing heavy by itself.
"""

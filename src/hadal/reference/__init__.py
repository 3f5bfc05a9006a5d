"""Slow, plain torch twins of the kernels, which define what a kernel computes; the types of
weights; and the oracles of exactness tests.
"""

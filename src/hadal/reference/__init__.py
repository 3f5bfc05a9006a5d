"""Slow, plain torch twins of all kernels, with the same names and signatures; they define what a
kernel computes.
"""

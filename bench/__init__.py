"""Benchmarks, one module each. Each prints the figure of a peer or the machine's limit beside ours. This
package imports nothing heavy by itself.
"""

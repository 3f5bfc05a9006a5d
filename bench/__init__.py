"""Benchmarks, one module each. Most print a peer's figure or the machine's limit beside Hadal's. This
package itself imports nothing heavy.
"""

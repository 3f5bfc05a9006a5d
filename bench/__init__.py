"""Benchmarks, one module each. Most print Hadal's figure beside that of another engine or beside the
machine's limit. Importing this package loads no other module.
"""

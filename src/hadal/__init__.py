"""Hadal: DeepSeek-V3/R1's inference system, whole, in Python."""

__version__ = "0.1.0"

"""DeepSeek's published day: its load, cache, units (as a fluid and in windows) and figures."""

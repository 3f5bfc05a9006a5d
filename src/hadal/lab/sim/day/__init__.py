"""The published day: its load, its cache, its units as a fluid and in windows, and its figures."""

"""Predicted cost of a plan in seconds: pure arithmetic over measured or sourced times."""

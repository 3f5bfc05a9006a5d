"""Processes: how the supervisor forks, starts, watches and ends them, their logs and private files."""

"""The other engines on the same model and machine, each in a process and environment of its own."""

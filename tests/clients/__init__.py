"""Other people's clients and suites against a running server; see `__main__`."""

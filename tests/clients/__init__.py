"""Other projects' clients and test suites against a running server; see `__main__`."""

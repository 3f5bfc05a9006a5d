"""Room desk: requests and their replies between HTTP and the front, keys, accounts, metrics."""

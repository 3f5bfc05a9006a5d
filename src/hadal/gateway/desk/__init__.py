"""Room desk: keys, accounts and metrics, and the requests and replies between HTTP and the front."""

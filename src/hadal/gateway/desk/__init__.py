"""Room desk: keys, accounts and metrics, requests and replies between HTTP and the front."""

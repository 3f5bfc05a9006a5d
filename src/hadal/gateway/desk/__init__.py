"""Keys, accounts and metrics, and requests and replies on their way between HTTP and the front."""

"""House apps: pages, terminal chat and load generator; extra `apps`."""

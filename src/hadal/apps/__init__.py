"""User applications: pages, terminal chat and load generator; extra `apps`."""

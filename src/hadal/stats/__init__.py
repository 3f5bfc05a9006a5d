"""Statistics: facts of the ledger in, tables out. Counts and charges are exact. Uses no clock."""

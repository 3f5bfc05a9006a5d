"""Statistics: facts of the ledger in, tables out. Exact integers; independent of a clock."""

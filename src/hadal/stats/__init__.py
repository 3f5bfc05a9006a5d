"""The ledger: facts in, tables out. Exact integers, no clock."""

"""The ledger on its way to a database: the queue and thread that write facts, and the store."""

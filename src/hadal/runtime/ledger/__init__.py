"""Writing of the ledger: the queue and thread that write facts, the outbox, and the database."""

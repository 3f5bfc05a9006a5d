"""Expert parallelism between ranks: dispatch, combine, and the groups that carry their messages."""

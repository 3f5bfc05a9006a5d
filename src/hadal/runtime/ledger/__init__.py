"""TODO src/hadal/runtime/ledger."""

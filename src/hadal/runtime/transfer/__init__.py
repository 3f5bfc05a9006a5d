"""TODO src/hadal/runtime/transfer."""

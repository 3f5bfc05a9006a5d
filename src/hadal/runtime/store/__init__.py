"""TODO src/hadal/runtime/store."""

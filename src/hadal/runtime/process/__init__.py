"""TODO src/hadal/runtime/process."""

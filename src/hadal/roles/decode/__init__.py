"""TODO src/hadal/roles/decode."""

"""TODO src/hadal/roles/prefill."""

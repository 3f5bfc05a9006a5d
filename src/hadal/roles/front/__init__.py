"""TODO src/hadal/roles/front."""

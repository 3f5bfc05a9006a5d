"""TODO src/hadal/roles/experts."""

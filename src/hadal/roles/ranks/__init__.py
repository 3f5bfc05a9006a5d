"""TODO src/hadal/roles/ranks."""

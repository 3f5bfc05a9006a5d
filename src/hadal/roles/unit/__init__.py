"""TODO src/hadal/roles/unit."""

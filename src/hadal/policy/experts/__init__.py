"""TODO src/hadal/policy/experts."""

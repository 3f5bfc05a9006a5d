"""TODO src/hadal/comm/mesh."""

"""TODO src/hadal/sim/day."""

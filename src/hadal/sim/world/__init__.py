"""TODO src/hadal/sim/world."""

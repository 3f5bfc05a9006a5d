"""TODO src/hadal/sim/plan."""

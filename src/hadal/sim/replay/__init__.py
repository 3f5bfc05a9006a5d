"""TODO src/hadal/sim/replay."""

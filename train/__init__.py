"""Training of hadal-tiny, the shipped model, from random weights on a CPU."""

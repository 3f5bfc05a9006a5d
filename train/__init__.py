"""Training of hadal-tiny, the model that ships, from nothing on a CPU."""

"""Our own group of ranks over TCP: the frames and connections of one pair, and the mesh of all."""

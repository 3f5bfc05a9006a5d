"""Own implementation of a mesh of ranks over TCP: frames, connections per pair, the mesh."""

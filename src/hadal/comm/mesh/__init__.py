"""Mesh of ranks over TCP, our own implementation: frames, connections of pairs, and the whole mesh."""

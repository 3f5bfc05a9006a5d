"""Mesh of ranks over TCP, our own implementation: frames, a connection per pair, and the whole mesh."""

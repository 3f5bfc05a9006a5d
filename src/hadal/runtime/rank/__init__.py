"""A process with a Runner: its device, its model, its peers, and the host of its role."""

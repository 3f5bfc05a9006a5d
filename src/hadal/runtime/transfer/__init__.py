"""KV blocks and experts' weights on their way between pools: shared memory, NIXL or TCP."""

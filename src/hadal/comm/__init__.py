"""Messages of expert parallelism: dispatch of tokens to their experts' ranks, and combine."""

"""A model's tokens: the bytes of each, and the tokens that a grammar allows next."""

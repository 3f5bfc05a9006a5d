"""A model's tokens: their bytes, and the tokens allowed next by a grammar."""

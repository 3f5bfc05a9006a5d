"""A model's tokens: their bytes, and which of them may come next where a grammar says so."""

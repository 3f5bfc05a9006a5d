"""Chat templates, prompts, and tokens made into text."""

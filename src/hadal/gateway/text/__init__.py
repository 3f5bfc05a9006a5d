"""Room text: chat templates, prompts, and tokens made into text."""

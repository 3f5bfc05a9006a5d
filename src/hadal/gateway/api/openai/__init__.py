"""OpenAI's Chat Completions and Completions APIs."""

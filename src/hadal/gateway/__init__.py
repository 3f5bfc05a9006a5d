"""HTTP process: OpenAI's and Anthropic's APIs on one side, the front on the other. No torch."""

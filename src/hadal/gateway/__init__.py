"""The HTTP process: OpenAI's API on one side, the front role on the other. Loads no torch."""

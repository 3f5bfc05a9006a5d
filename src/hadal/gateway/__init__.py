"""HTTP process: OpenAI's API on one side, the front (router) on the other. Loads no torch."""

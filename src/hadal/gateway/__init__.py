"""HTTP process: OpenAI's API on one side, the front (request router) on the other. Loads no
torch.
"""

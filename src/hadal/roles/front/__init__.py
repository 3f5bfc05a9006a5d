"""The front (request router): owner of all requests, from submission to last token, and of their
routes.

Independent of text, HTTP and processes: the gateway sends prompts and receives output as tokens.
"""

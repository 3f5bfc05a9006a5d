"""The front: every request from its submission to its last token, the units, and routes between.

Knows no text, no HTTP and no process; the gateway gives it tokens and takes tokens from it.
"""

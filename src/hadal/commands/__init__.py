"""Commands that have a page of their own; cli.py registers them."""

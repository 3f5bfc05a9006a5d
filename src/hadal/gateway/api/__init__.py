"""Room api: requests and replies as each API writes them."""

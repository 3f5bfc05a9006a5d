"""KV blocks as counts: who holds which, and until when. Bytes move elsewhere."""

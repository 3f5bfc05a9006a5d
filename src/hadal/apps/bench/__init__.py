"""`hadal bench`: load for any server with OpenAI's API."""

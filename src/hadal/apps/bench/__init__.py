"""Load generator `hadal bench` for any server with OpenAI's API."""

"""Room terminal: the chat of `hadal chat`."""

"""Terminal chat of `hadal chat`."""

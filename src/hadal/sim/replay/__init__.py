"""A recorded run of live roles, lived and decided again."""

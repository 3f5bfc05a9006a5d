"""Decisions, most as pure functions: a frozen snapshot in, a value out; the caller applies it."""

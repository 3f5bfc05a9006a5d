"""Requests and replies in the form of each API."""

"""Amounts as text for people: bytes, parameters, and nouns with their number."""

from __future__ import annotations


def gb(number: int) -> str:
    """Return bytes as text in units of 10^9 (or 10^6), like a GPU's memory."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def millions(number: int) -> str:
    """Return a number of parameters as model cards write it."""
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def plural(number: int, noun: str) -> str:
    """Return the number with its noun."""
    return f"{number} {noun}" + ("" if number == 1 else "s")

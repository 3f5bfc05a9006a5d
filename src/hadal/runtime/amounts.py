"""Amounts as text for people: bytes, parameters, and nouns with their number."""

from __future__ import annotations


def gb(number: int) -> str:
    """Return bytes in GB (10^9), or in MB (10^6) below 0.1 GB."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def millions(number: int) -> str:
    """Return a number of parameters in billions, or in millions below 10^9."""
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def plural(number: int, noun: str) -> str:
    """Return the number with its noun, which gets an "s" unless the number is 1."""
    return f"{number} {noun}" + ("" if number == 1 else "s")

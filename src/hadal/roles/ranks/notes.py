"""Sentences for a unit's log. Independent of any logger."""

from __future__ import annotations


class Routine(str):
    """Note about normal operation. Every other note is a warning."""

    __slots__ = ()

"""What happened to a unit, in sentences for its log. Knows no logger."""

from __future__ import annotations


class Routine(str):
    """A note of what goes as it should; any other is a warning."""

    __slots__ = ()

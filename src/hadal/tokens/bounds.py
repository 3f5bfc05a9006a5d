"""Bounds of numbers in a form that llguidance reads rightly.

If no whole number lies between two bounds, llguidance 1.9.1 allows a whole number that one of them
excludes: with more than 5 and at most 5.5, it allows 5. Here such a bound moves by a small share of
the distance, so that its number stays excluded. Bounds may be in different parts of a schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

_SHARE = 1e-12
"""Share of the distance of two bounds by which one moves."""
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
VALUES = ("const", "enum", "default", "examples")
"""Keywords with values, in which no name is a keyword."""


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with excluded whole numbers that llguidance excludes."""
    lower, upper = [*_bounds(schema, _LOWER)], [*_bounds(schema, _UPPER)]
    moved: dict[str, Any] = _moved(schema, lower, upper)
    return moved


def _bounds(part: Any, names: Sequence[str]) -> Iterator[float]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name in names and _is_number(value):
                yield value
            elif name not in VALUES:
                yield from _bounds(value, names)
    elif isinstance(part, list):
        for each in part:
            yield from _bounds(each, names)


def _moved(part: Any, lower: Sequence[float], upper: Sequence[float]) -> Any:
    if isinstance(part, list):
        return [_moved(each, lower, upper) for each in part]
    if not isinstance(part, dict):
        return part
    found = {
        name: value if name in VALUES else _moved(value, lower, upper)
        for name, value in part.items()
    }
    for name, others, sign in (("exclusiveMinimum", upper, 1), ("exclusiveMaximum", lower, -1)):
        bound = part.get(name)
        if _is_number(bound) and float(bound).is_integer():
            near = [gap for each in others if 0 < (gap := sign * (each - bound)) < 1]
            if near:
                least = 4 * math.ulp(bound)
                found[name] = bound + sign * max(min(near) * _SHARE, least)
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Values of result files, and formatting of numbers. Any value may be missing or null there (no
window ran, no published value): a number is then None, written as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOTHING = "–"
LARGEST = 1e300
"""Largest valid number; sums of larger ones might not be finite."""
UNITS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))


def number(source: Mapping[str, Any], *path: str) -> float | None:
    """Return the finite number at a path of keys; None if there is none."""
    found: Any = source
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return as_number(found)


def as_number(value: Any) -> float | None:
    """Return the value as a number; None if it is no number, or above LARGEST in magnitude."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= LARGEST else None


def numbers(source: Mapping[str, Any], *path: str) -> list[float | None]:
    """Return the list at a path of keys, None for entries without a number; empty if there is none."""
    found: Any = source
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return [as_number(value) for value in found] if isinstance(found, list | tuple) else []


def present(values: Sequence[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def mapping(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object at a key, empty if there is none."""
    found = source.get(key)
    return found if isinstance(found, Mapping) else {}


def rows(source: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the objects in the list at a key; other entries are left out."""
    found = source.get(key)
    return (
        [row for row in found if isinstance(row, Mapping)]
        if isinstance(found, list | tuple)
        else []
    )


def ratio(above: float | None, below: float | None) -> float | None:
    """Return the quotient; None if a value is missing, the divisor is 0 or the result is not finite."""
    return None if above is None or not below else as_number(above / below)


def plain(value: float | None, decimals: int = 1) -> str:
    """Return the number with thousands separators; from 1,000 on without decimals, from 1e15 on
    with an exponent.
    """
    if value is None:
        return NOTHING
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    return f"{value:,.{0 if abs(value) >= 1000 else decimals}f}".replace("-", "−")


def compact(value: float | None, digits: int = 3) -> str:
    """Return the number with `digits` significant digits and a unit: 608 B, 73.7 k, 0.56; from 1e18
    on with an exponent.
    """
    if value is None:
        return NOTHING
    if abs(value) >= 1e18:
        return f"{value:.{digits}g}"
    for limit, unit in UNITS:
        if abs(value) >= limit * (1 - 0.5 * 10**-digits):
            return _significant(value / limit, digits) + unit
    return _significant(value, digits)


def _significant(value: float, digits: int) -> str:
    whole = len(str(int(abs(value))))
    text = f"{value:,.{max(0, digits - whole)}f}" if abs(value) >= 1 else f"{value:.{digits}g}"
    return (text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text).replace(
        "-", "−"
    )


def dollars(value: float | None) -> str:
    """Return dollars: with cents below $1,000, whole from $1,000 on, with a unit from $10 M on."""
    if value is None:
        return NOTHING
    sign = "−" if value < 0 else ""
    amount = abs(value)
    if amount >= 1e7:
        return f"{sign}${compact(amount, 4)}"
    return f"{sign}${amount:,.{0 if amount >= 1000 else 2}f}"


def percent(value: float | None, decimals: int = 1) -> str:
    """Return a value in percent (100 is the whole) with the percent sign."""
    return NOTHING if value is None else f"{plain(value, decimals)} %"


def signed_percent(value: float | None, decimals: int = 1) -> str:
    """Return a relative difference in percent: 0.01 gives +1.0 %."""
    if value is None:
        return NOTHING
    text = plain(100 * value, decimals)
    return f"{'' if text.startswith('−') else '+'}{text} %"


def duration(seconds: float | None) -> str:
    """Return a duration: in milliseconds below a second, else in seconds."""
    if seconds is None:
        return NOTHING
    return (
        f"{_significant(seconds * 1e3, 3)} ms"
        if abs(seconds) < 1
        else f"{_significant(seconds, 3)} s"
    )


def hour_label(hour: float | None) -> str:
    return NOTHING if hour is None else f"{int(hour) % 24:02}:00"

"""Three tools that the chat offers a model: arithmetic, a table of countries, units of measure.

A model's arguments are not trusted: a mistake becomes an error text for the model, and calls only
do arithmetic or read a table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation, Overflow, localcontext
from typing import Any

_MAX_DIGITS = 50
"""Digits of a result; longer results are rounded."""
_MAX_POWER = 1000
_MAX_CHARS = 100
"""Longest accepted number, in characters."""
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
"""Number with commas between groups of three digits."""


class ToolError(Exception):
    """Error: a call cannot be answered; the text is for the model."""


def calculate(arguments: dict[str, Any]) -> str:
    """Compute `a operator b` in decimal arithmetic, exact up to 50 digits. Raises ToolError."""
    a, b = _number(arguments, "a"), _number(arguments, "b")
    op = str(arguments.get("operator", ""))
    if op not in _OPERATIONS:
        raise ToolError(f"operator is {op[:20]!r}; one of {' '.join(_OPERATIONS)} is needed.")
    if op == "^" and (abs(b) > _MAX_POWER or b != b.to_integral_value()):
        raise ToolError(f"b is {b}; exponents are whole numbers of at most +/-{_MAX_POWER}.")
    with localcontext(prec=_MAX_DIGITS) as context:
        context.traps[Overflow] = True
        try:
            found = _OPERATIONS[op](a, b)
        except ZeroDivisionError:
            raise ToolError("Nothing can be divided by zero.") from None
        except (InvalidOperation, Overflow):
            found = Decimal("nan")
    if not found.is_finite():
        raise ToolError(f"{a} {op} {b} has no result that can be written down.")
    return _shown(found)


_OPERATIONS: dict[str, Callable[[Decimal, Decimal], Decimal]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "^": lambda a, b: a**b,
}


def look_up(arguments: dict[str, Any]) -> str:
    """Return a country's capital, population or area. Raises ToolError."""
    table, key = str(arguments.get("table", "")), str(arguments.get("key", ""))
    if table not in _COLUMNS:
        raise ToolError(f"There is no table {table[:40]!r}; there are {', '.join(_COLUMNS)}.")
    row = _COUNTRIES.get(key.strip().lower())
    if row is None:
        raise ToolError(f"{key[:60]!r} is not in the table.")
    return str(row[_COLUMNS.index(table)])


_COLUMNS = ("capital", "population", "area")
# Capital; population in 2023, to the nearest hundred thousand; area of land and water in square
# kilometres.
_COUNTRIES: dict[str, tuple[str, int, int]] = {
    "argentina": ("Buenos Aires", 45_800_000, 2_780_400),
    "australia": ("Canberra", 26_600_000, 7_688_300),
    "austria": ("Vienna", 9_100_000, 83_900),
    "belgium": ("Brussels", 11_800_000, 30_700),
    "brazil": ("Brasilia", 203_100_000, 8_510_400),
    "canada": ("Ottawa", 40_100_000, 9_984_700),
    "chile": ("Santiago", 19_600_000, 756_100),
    "china": ("Beijing", 1_409_700_000, 9_597_000),
    "denmark": ("Copenhagen", 5_900_000, 43_100),
    "egypt": ("Cairo", 105_200_000, 1_002_000),
    "finland": ("Helsinki", 5_600_000, 338_500),
    "france": ("Paris", 68_200_000, 643_800),
    "germany": ("Berlin", 84_700_000, 357_600),
    "greece": ("Athens", 10_400_000, 132_000),
    "india": ("New Delhi", 1_428_600_000, 3_287_300),
    "indonesia": ("Jakarta", 278_700_000, 1_904_600),
    "ireland": ("Dublin", 5_300_000, 70_300),
    "italy": ("Rome", 59_000_000, 302_100),
    "japan": ("Tokyo", 124_400_000, 378_000),
    "kenya": ("Nairobi", 51_500_000, 582_600),
    "mexico": ("Mexico City", 129_700_000, 1_964_400),
    "netherlands": ("Amsterdam", 17_900_000, 41_900),
    "nigeria": ("Abuja", 223_800_000, 923_800),
    "norway": ("Oslo", 5_500_000, 385_200),
    "peru": ("Lima", 33_700_000, 1_285_200),
    "poland": ("Warsaw", 37_600_000, 312_700),
    "portugal": ("Lisbon", 10_600_000, 92_200),
    "south africa": ("Pretoria", 62_000_000, 1_221_000),
    "south korea": ("Seoul", 51_700_000, 100_400),
    "spain": ("Madrid", 48_400_000, 506_000),
    "sweden": ("Stockholm", 10_600_000, 450_300),
    "switzerland": ("Bern", 9_000_000, 41_300),
    "turkey": ("Ankara", 85_400_000, 783_600),
    "united kingdom": ("London", 68_300_000, 243_600),
    "united states": ("Washington", 334_900_000, 9_833_500),
    "vietnam": ("Hanoi", 100_300_000, 331_300),
}


def convert(arguments: dict[str, Any]) -> str:
    """Convert a measure to another unit of the same quantity. Raises ToolError."""
    value = _number(arguments, "value")
    said = (str(arguments.get(name, "")).strip() for name in ("from", "to"))
    units = [unit if unit in _UNITS else _ALIASES.get(unit.lower(), unit) for unit in said]
    for unit in units:
        if unit not in _UNITS:
            raise ToolError(f"There is no unit {unit[:20]!r}; there are {', '.join(_UNITS)}.")
    (quantity, factor, zero), (other, other_factor, other_zero) = (_UNITS[unit] for unit in units)
    if quantity != other:
        raise ToolError(f"{units[0]} measures {quantity} and {units[1]} measures {other}.")
    with localcontext(prec=_MAX_DIGITS):
        base = value * Decimal(factor) + Decimal(zero)
        try:
            found = (base - Decimal(other_zero)) / Decimal(other_factor)
            # Small results have six significant digits; temperatures, which are differences, six
            # decimals.
            places = max(6, 5 - found.adjusted()) if found and quantity != "temperature" else 6
            return _shown(round(found, places))
        except InvalidOperation:
            raise ToolError(f"{value} {units[0]} has too many digits.") from None


# unit -> (quantity, its size in the quantity's first unit, its zero point in that unit).
_UNITS: dict[str, tuple[str, str, str]] = {
    "m": ("length", "1", "0"),
    "km": ("length", "1000", "0"),
    "cm": ("length", "0.01", "0"),
    "mm": ("length", "0.001", "0"),
    "inch": ("length", "0.0254", "0"),
    "foot": ("length", "0.3048", "0"),
    "yard": ("length", "0.9144", "0"),
    "mile": ("length", "1609.344", "0"),
    "kg": ("mass", "1", "0"),
    "g": ("mass", "0.001", "0"),
    "t": ("mass", "1000", "0"),
    "ounce": ("mass", "0.028349523125", "0"),
    "pound": ("mass", "0.45359237", "0"),
    "l": ("volume", "1", "0"),
    "ml": ("volume", "0.001", "0"),
    "gallon": ("volume", "3.785411784", "0"),
    "s": ("time", "1", "0"),
    "min": ("time", "60", "0"),
    "h": ("time", "3600", "0"),
    "day": ("time", "86400", "0"),
    "K": ("temperature", "1", "0"),
    "C": ("temperature", "1", "273.15"),
    "F": ("temperature", "0.55555555555555555555555555555555555555555", "255.37222222222222222222"),
}
_ALIASES = {
    alias: unit
    for unit, aliases in {
        "m": "metre metres meter meters",
        "km": "kilometre kilometres kilometer kilometers",
        "cm": "centimetre centimetres centimeter centimeters",
        "mm": "millimetre millimetres millimeter millimeters",
        "inch": "inches in",
        "foot": "feet ft",
        "yard": "yards yd",
        "mile": "miles mi",
        "kg": "kilogram kilograms kilo kilos",
        "g": "gram grams",
        "t": "ton tons tonne tonnes",
        "ounce": "ounces oz",
        "pound": "pounds lb lbs",
        "l": "litre litres liter liters",
        "ml": "millilitre millilitres milliliter milliliters",
        "gallon": "gallons gal",
        "s": "second seconds sec",
        "min": "minute minutes",
        "h": "hour hours",
        "day": "days d",
        "K": "kelvin",
        "C": "celsius °c",
        "F": "fahrenheit °f",
    }.items()
    for alias in (unit.lower(), *aliases.split())
}
"""Other name of a unit, in lower case -> the unit."""


def run(name: str, arguments: str) -> str:
    """Run a tool with JSON arguments from the model, and return its result. Raises ToolError."""
    tool = _TOOLS.get(name)
    if tool is None:
        raise ToolError(f"There is no tool {name[:60]!r}; there are {', '.join(_TOOLS)}.")
    try:
        given = json.loads(arguments or "{}", parse_float=Decimal)
    except (ValueError, RecursionError, InvalidOperation):
        raise ToolError("The arguments are not valid JSON.") from None
    if not isinstance(given, dict):
        raise ToolError("The arguments are not a JSON object.")
    return tool(given)


_TOOLS = {"calculate": calculate, "look_up": look_up, "convert": convert}


def _function(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }


def _described(kind: str, description: str, values: Iterable[str] = ()) -> dict[str, Any]:
    return {"type": kind, **({"enum": [*values]} if values else {}), "description": description}


DEFINITIONS = [
    _function(
        "calculate",
        "Exact arithmetic with two numbers.",
        {
            "a": _described("number", "The first number."),
            "operator": _described("string", "What to do.", _OPERATIONS),
            "b": _described("number", "The second number."),
        },
    ),
    _function(
        "look_up",
        "A country's capital, population or area in square kilometres.",
        {
            "table": _described("string", "Which value.", _COLUMNS),
            "key": _described("string", "The country."),
        },
    ),
    _function(
        "convert",
        "A value in another unit.",
        {
            "value": _described("number", "How much."),
            "from": _described("string", "The unit it has."),
            "to": _described("string", "The unit wanted."),
        },
    ),
]
"""Definitions of the tools in OpenAI's format, as requests offer them."""


def _number(arguments: dict[str, Any], name: str) -> Decimal:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        raise ToolError(f"{name} is missing; a number is needed.")
    text = str(value).strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    try:
        number = Decimal(text if len(text) <= _MAX_CHARS else "nan")
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or abs(number.adjusted()) > 300:
        raise ToolError(f"{name} is {str(value)[:40]!r}; a number is needed.")
    return number


def _shown(number: Decimal) -> str:
    """Return a number without trailing zeros; only very large or small ones have an exponent."""
    if number and not -30 < number.adjusted() < _MAX_DIGITS:
        return f"{number.normalize():E}"
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


assert all(math.isfinite(float(factor)) for _, factor, _ in _UNITS.values())

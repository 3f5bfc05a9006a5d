"""Mutations of valid files, drawn from a seed, such as an attacker or a failing disk might produce."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

HUGE = "9" * 5_000
_WORDS = {
    "@huge": HUGE,
    "@-huge": f"-{HUGE}",
    "@float": "1e400",
    "@-float": "-1e400",
    "@nan": "NaN",
    "@tiny": "1e-320",
    "@deep": "[" * 3_000 + "]" * 3_000,
    "@deeper": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@half": '"\\ud800"',
    "@bits": str(2**63),
    "@zero": "-0.0",
}
"""Placeholder string -> JSON text that json.dumps would not write."""
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    10**6,
    10**9,
    2**31,
    2**53,
    -(10**18),
    0.5,
    -0.5,
    1e-9,
    1e18,
    1e300,
    "",
    "1",
    "auto",
    "a\nb",
    "a\0b",
    "x" * 3_000,
    "é" * 100,
    "../../etc/passwd",
    "/",
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    {"": None},
    {"type": "Sequence", "decoders": "ByteLevel"},
    [0] * 3_000,
    *_WORDS,
)
_TOML_VALUES = (
    "nan",
    "inf",
    "-inf",
    "1e400",
    "-1",
    "0",
    "1_000_000_000",
    HUGE,
    f"-{HUGE}",
    "0x" + "f" * 400,
    "9223372036854775808",
    "true",
    '""',
    '"x"',
    '"a\\nb"',
    "'" + "y" * 5_000 + "'",
    "[]",
    "[[1]]",
    "{}",
    "{a = 1}",
    "[" * 3_000 + "]" * 3_000,
    "{a = " * 200 + "1" + "}" * 200,
    "1979-05-27",
    "1e-320",
    "-0.0",
    "0.0",
    "1e300",
    "[nan]",
    '["a", 1]',
    "1e18",
)


def mutated(value: Any, rng: Random) -> bytes:
    """Return JSON text of a value with one to three changes, sometimes damaged as text."""
    changed = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(_places(changed)))
        if rng.random() < 0.15:
            del holder[key]
            if not any(True for _ in _places(changed)):
                break
        elif rng.random() < 0.1 and isinstance(holder, dict):
            holder[rng.choice(["", "x" * 5_000, "a\nb", str(key) + "s"])] = copy.deepcopy(
                rng.choice(_VALUES)
            )
        else:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
    text = json.dumps(changed)
    for word, meant in _WORDS.items():
        text = text.replace(json.dumps(word), meant)
    return damaged(text.encode(), rng)


def mutated_toml(text: str, rng: Random) -> bytes:
    """Return TOML text with one to three values replaced or invalid lines inserted, sometimes
    damaged as text.
    """
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        if equals and not key.lstrip().startswith("#"):
            lines[at] = f"{key}= {rng.choice(_TOML_VALUES)}"
        elif rng.random() < 0.2:
            lines.insert(
                at,
                rng.choice(
                    ["a." * 50_000 + "b = 1", "[x]", "x = 1", "[prefill.units]", "[[decode]]"]
                ),
            )
    return damaged("\n".join(lines).encode(), rng)


def damaged(data: bytes, rng: Random) -> bytes:
    """Return the data, mostly unchanged; else truncated, with changed bytes, or doubled."""
    kind = rng.random()
    if kind < 0.03:
        return data[: rng.randrange(len(data) + 1)]
    if kind < 0.06:
        found = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            found[rng.randrange(len(found))] = rng.randrange(256)
        return bytes(found)
    return data * 2 if kind < 0.07 else data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (holder, key) in a value, but only about the first 200 of each container."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for number, (key, one) in enumerate(items):
        if number > 200:
            break
        yield value, key
        if isinstance(one, dict | list):
            yield from _places(one)

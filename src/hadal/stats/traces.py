"""Published request traces, read row by row: Mooncake's JSON lines and Azure's CSV.

The caller opens the files and passes lines of text. Missing facts are not invented: Azure's rows
have no parts, so their requests share no prefixes. Independent of workloads and plans.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hadal.core.documents import parse_json, shown
from hadal.core.errors import ConfigError

MOONCAKE_PART_TOKENS = 512
_TIME = re.compile(
    r"\s*([0-9]{4}-[0-9]{2}-[0-9]{2}["
    r" T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?)(?:Z|\+00:00)?\s*"
)
_MOST_TOKENS, _MOST_S = 1 << 30, 1e10
"""Limits of a valid file: tokens of a request, and seconds of a trace (300 years)."""


class TraceRow(NamedTuple):
    """One request of a trace."""

    at_s: float
    tokens_in: int
    tokens_out: int
    parts: tuple[int, ...] = ()
    """Numbers of its 512-token parts; the last part may be incomplete. Equal numbers: equal text
    from the first token on. Empty: unknown.
    """


def mooncake_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    """Yield the rows of Mooncake's JSON lines (FAST'25 release). Raises ConfigError with the line
    and its mistake: no JSON object, a wrong field, or fewer parts than its length needs.
    """
    for number, line in enumerate(lines, 1):
        where = f"line {number}"
        row = parse_json(line, where)
        if not isinstance(row, dict):
            raise ConfigError(
                f"{where} is {shown(row)}: not one of Mooncake's traces, whose lines are objects."
            )
        length = _count(row.get("input_length"), f"{where}: input_length")
        num_out = _count(row.get("output_length"), f"{where}: output_length")
        at_ms, parts = row.get("timestamp"), row.get("hash_ids")
        if (
            isinstance(at_ms, bool)
            or not isinstance(at_ms, int | float)
            or not 0 <= at_ms <= _MOST_S * 1e3
        ):
            raise ConfigError(
                f"{where}: timestamp is {shown(at_ms)}; it must be milliseconds, 0 or more."
            )
        if not isinstance(parts, list) or not all(type(part) is int for part in parts):
            raise ConfigError(f"{where}: hash_ids is {shown(parts)}; it must be a list of numbers.")
        if len(parts) * MOONCAKE_PART_TOKENS < length:
            raise ConfigError(
                f"{where}: {len(parts)} hash_ids for {length} tokens: not one of Mooncake's traces."
            )
        yield TraceRow(at_ms / 1e3, length, num_out, tuple(parts))


def azure_rows(lines: Iterable[str]) -> list[TraceRow]:
    """Return the rows of Azure's LLM inference traces in order of arrival: CSV with TIMESTAMP,
    ContextTokens, GeneratedTokens (0 counts as 1). Second 0 is the first arrival. Raises
    ConfigError.
    """
    try:
        rows = list(csv.DictReader(lines))
    except csv.Error as error:
        raise ConfigError(f"cannot be read as CSV ({error}).") from error
    if not rows or not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= rows[0].keys():
        raise ConfigError(
            "no rows with TIMESTAMP, ContextTokens and GeneratedTokens: not one of Azure's traces."
        )
    at = np.array([_time(row["TIMESTAMP"], f"line {number}") for number, row in enumerate(rows, 2)])
    tokens_in, tokens_out = (
        [_count(row[name], f"line {number}: {name}") for number, row in enumerate(rows, 2)]
        for name in ("ContextTokens", "GeneratedTokens")
    )
    at_s = (at - at.min()) / np.timedelta64(1, "s")
    return [
        TraceRow(float(at_s[index]), tokens_in[index], max(tokens_out[index], 1))
        for index in np.argsort(at, kind="stable")
    ]


def _count(value: Any, what: str) -> int:
    """Return a number of tokens, given as an integer or as digits. Raises ConfigError."""
    if isinstance(value, str) and re.fullmatch(r" *[0-9]{1,10} *", value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
        raise ConfigError(
            f"{what} is {shown(value)}; it must be a number of tokens, at most {_MOST_TOKENS:,}."
        )
    return value


def _time(value: Any, where: str) -> np.datetime64:
    """Return a UTC time from 1970 to 2199, which fits 64-bit nanoseconds. Raises ConfigError."""
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is not None and "1970" <= found[1] < "2200":
        try:
            return np.datetime64(found[1], "ns")
        except ValueError:  # For example February 31.
            pass
    raise ConfigError(
        f"{where}: TIMESTAMP is {shown(value)}; it must be a time such as 2023-11-16"
        " 18:15:46.6805900."
    )

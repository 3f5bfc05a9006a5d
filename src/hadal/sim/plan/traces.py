"""Published traces as workloads. Text comes in, as lines or as what JSON made of it: opening files
is the caller's.

What a trace does not say is not made up: without ids of blocks nothing is a prefix of anything,
and every request is a session by itself.

Knows no plans.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from hadal.core.documents import parse_json, shown
from hadal.core.errors import ConfigError
from hadal.sim.day.clock import Floats, Ints
from hadal.sim.workload import NO_PREFIX, V3, Parts, Workload

MOONCAKE_PART_TOKENS = 512
_NEVER = (0, 0, 1 << 62)
_TIME = re.compile(
    r"\s*([0-9]{4}-[0-9]{2}-[0-9]{2}["
    r" T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?)(?:Z|\+00:00)?\s*"
)
_MOST_TOKENS, _MOST_S = 1 << 30, 1e10
"""Most tokens of a request, and most seconds of a trace: 300 years. More is a damaged file."""


class MooncakeRow(NamedTuple):
    at_s: float
    tokens_in: int
    tokens_out: int
    parts: tuple[int, ...]
    """Numbers of its 512-token parts, the last one perhaps not full; equal numbers: equal text from
    the first token.
    """


def mooncake_rows(lines: Iterable[str]) -> Iterator[MooncakeRow]:
    """Mooncake's JSON lines (FAST'25 release), one by one. Raises ValueError naming the line and
    what is wrong in it: a field, or that it has fewer parts than its length.
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
                f"{where}: timestamp is {shown(at_ms)}; milliseconds from 0 on are needed."
            )
        if not isinstance(parts, list) or not all(type(part) is int for part in parts):
            raise ConfigError(f"{where}: hash_ids is {shown(parts)}; a list of numbers is needed.")
        if len(parts) * MOONCAKE_PART_TOKENS < length:
            raise ConfigError(
                f"{where}: {len(parts)} parts for {length} tokens: not one of Mooncake's traces."
            )
        yield MooncakeRow(at_ms / 1e3, length, num_out, tuple(parts))


def mooncake(lines: Iterable[str]) -> Workload:
    """A Mooncake trace. The first request that begins with all full parts of an earlier one and is
    longer than that and its answer is that session's next turn; what else of its text was there
    before counts as seen all the same. `idle_s`: since its deepest known part was used.
    """
    rows = sorted(mooncake_rows(lines), key=lambda row: row.at_s)
    end_to_turn: dict[int, tuple[int, int, int]] = {}
    """Session, turn and tokens with the answer, by the last full part of a prompt that nobody went
    on from.
    """
    part_to_use: dict[int, tuple[int, float]] = {}
    """Tokens of it that were computed, 512 but where a prompt ends, and when last."""
    sessions, turns, seen, idle_s = [], [], [], []
    for number, row in enumerate(rows):
        full = row.parts[: row.tokens_in // MOONCAKE_PART_TOKENS]
        known = list(takewhile(part_to_use.__contains__, row.parts))
        seen.append(sum(part_to_use[part][0] for part in known))
        idle_s.append(row.at_s - part_to_use[known[-1]][1] if known else np.inf)
        end = next(
            (part for part in reversed(full) if end_to_turn.get(part, _NEVER)[2] <= row.tokens_in),
            None,
        )
        session, turn, _ = (number, -1, 0) if end is None else end_to_turn.pop(end)
        sessions.append(session)
        turns.append(turn + 1)
        part_to_use.update(dict.fromkeys(full, (MOONCAKE_PART_TOKENS, row.at_s)))
        part_to_use.update(
            dict.fromkeys(row.parts[len(full) :], (row.tokens_in % MOONCAKE_PART_TOKENS, row.at_s))
        )
        if full:
            end_to_turn[full[-1]] = (session, turn + 1, row.tokens_in + row.tokens_out)
    first = np.cumsum([0, *(len(row.parts) for row in rows)])
    parts = Parts(
        MOONCAKE_PART_TOKENS,
        first,
        np.array([part for row in rows for part in row.parts], dtype=np.int64),
    )
    at_s = np.array([row.at_s for row in rows])
    return _workload(
        at_s,
        _ints(row.tokens_in for row in rows),
        _ints(row.tokens_out for row in rows),
        session=_ints(sessions),
        turn=_ints(turns),
        tokens_seen=_ints(seen),
        idle_s=np.array(idle_s),
        parts=parts,
    )


def azure(lines: Iterable[str]) -> Workload:
    """Azure's LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Second 0:
    the first arrival.
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
        _ints(_count(row[name], f"line {number}: {name}") for number, row in enumerate(rows, 2))
        for name in ("ContextTokens", "GeneratedTokens")
    )
    order = np.argsort(at, kind="stable")
    at_s = (at[order] - at.min()) / np.timedelta64(1, "s")
    return _workload(at_s, tokens_in[order], np.maximum(tokens_out[order], 1))


def _count(value: Any, what: str) -> int:
    """Tokens, as a number or as its digits. Raises ConfigError."""
    if isinstance(value, str) and re.fullmatch(r" *[0-9]{1,10} *", value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
        raise ConfigError(
            f"{what} is {shown(value)}; a number of tokens, {_MOST_TOKENS:,} at most, is needed."
        )
    return value


def _time(value: Any, where: str) -> np.datetime64:
    """A time of UTC from 1970 to 2200: what 64 bits of nanoseconds hold. Raises ConfigError."""
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is not None and "1970" <= found[1] < "2200":
        try:
            return np.datetime64(found[1], "ns")
        except ValueError:  # The 31st of February.
            pass
    raise ConfigError(
        f"{where}: TIMESTAMP is {shown(value)}; a time such as 2023-11-16 18:15:46.6805900 is"
        " needed."
    )


def _workload(
    at_s: Floats,
    tokens_in: Ints,
    tokens_out: Ints,
    *,
    session: Ints | None = None,
    turn: Ints | None = None,
    tokens_seen: Ints | None = None,
    idle_s: Floats | None = None,
    parts: Parts | None = None,
) -> Workload:
    """Return the workload of one tenant, without system prompts."""
    assert all(a <= b for a, b in pairwise(at_s)), "arrivals are in order"
    zeros = np.zeros(len(at_s), dtype=np.int64)
    return Workload(
        at_s,
        np.arange(len(at_s)) if session is None else session,
        zeros if turn is None else turn,
        tokens_in,
        tokens_out,
        zeros,
        zeros + NO_PREFIX,
        zeros,
        zeros if tokens_seen is None else tokens_seen,
        np.full(len(at_s), np.inf) if idle_s is None else idle_s,
        zeros,
        zeros + V3,
        parts,
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)

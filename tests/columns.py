"""Conversion between Tokens messages, which are columns, and the rows that tests use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from hadal.core.messages.generation import Key
from hadal.core.messages.units import Tokens
from hadal.core.plans import Draw

Row = tuple[int, int, int, str | None]
"""One row: (attempt_id, index, token, finish)."""
_ATTEMPT_BITS = 24


def attempt_id_of(name: str, attempt: int = 0) -> int:
    """Return an attempt id that contains a name of at most four letters."""
    return int.from_bytes(name.encode()) << _ATTEMPT_BITS | attempt


def key_of(attempt_id: int) -> Key:
    number = attempt_id >> _ATTEMPT_BITS
    return number.to_bytes((number.bit_length() + 7) // 8).decode(), attempt_id % (
        1 << _ATTEMPT_BITS
    )


def tokens_message(
    unit: str, rows: Iterable[Row], draws: Mapping[int, Draw] = MappingProxyType({})
) -> Tokens:
    rows = list(rows)
    attempt_ids, indices, values = (
        np.array([row[at] for row in rows], np.int64).tobytes() for at in range(3)
    )
    finishes = tuple((at, row[3]) for at, row in enumerate(rows) if row[3] is not None)
    return Tokens(unit, attempt_ids, indices, values, finishes, dict(draws))


def rows_of(message: Tokens) -> list[Row]:
    attempt_ids, indices, values = (
        np.frombuffer(column, np.int64).tolist()
        for column in (message.attempt_ids, message.indices, message.values)
    )
    finishes = dict(message.finishes)
    rows = zip(attempt_ids, indices, values, strict=True)
    return [(*row, finishes.get(at)) for at, row in enumerate(rows)]

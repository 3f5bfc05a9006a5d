"""Requests sent to decode units, as arrays: a few operations count the tokens of a unit's step.

    Decode is sent: enter -> an attempt id | Tokens: take ... take | it ends or is released: leave

A message may have several tokens of an attempt. Each row counts as if it were a message of its own.

An attempt id contains the attempt's row. Ids are not reused, and ids of two fronts begin far apart,
so a late message about an attempt that has left finds no row. While an attempt runs, its growing
counts are here and not in its record. Uses no message but Tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from hadal.core.arrays import Bools, Floats, Ints
from hadal.core.errors import InvariantError
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.units import Tokens
from hadal.policy.fairness import OUTPUT_COST
from hadal.roles.front.record import Record

_ROW_BITS = 24
_NOBODY = -1
MAX_ROWS = 1 << _ROW_BITS
_FIRST_BITS = 38
"""Bits of the number in a front's first attempt id. 63 bits less the row leave 39 bits for the
number, so 2^38 more numbers can follow.
"""


class Served(NamedTuple):
    """Tokens drawn for one tenant."""

    tenant: str
    num_tokens: int
    cost: float
    """Cost of the tokens, divided by the weight of each request (policy/fairness)."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Result of a Tokens message. Rows in no field are repeats or last tokens of ended attempts."""

    good: Ints
    """Rows of the message with the next token of their attempt, in order; they are counted."""
    gaps: tuple[Record, ...]
    """Requests with a missing token."""
    unknown: tuple[int, ...]
    """Ids of attempts that continue on the unit but have left, or belong to another unit. An
    attempt has left after its last token, or after a missing one.
    """
    num_blocks: int
    """Number of blocks by which the unit's requests have grown."""
    num_attempts: int
    """Number of attempts in the good rows."""
    served: tuple[Served, ...] = ()
    """Tokens and costs of the good rows per tenant."""


class Running:
    """Table of requests sent to decode. Grows on demand, up to MAX_ROWS rows."""

    def __init__(self, num_rows: int = 32) -> None:
        self._free: list[int] = []
        self._records: list[Record | None] = []
        self._num_given = 0
        self._unit_to_number: dict[str, int] = {}
        self._attempt_id: Ints = np.zeros(0, np.int64)
        """Attempt id of each row; 0: the row is free."""
        self._unit: Ints = np.zeros(0, np.int64)
        self._num_prompt: Ints = np.zeros(0, np.int64)
        self._num_output: Ints = np.zeros(0, np.int64)
        self._num_blocks: Ints = np.zeros(0, np.int64)
        self._moved_s: Floats = np.zeros(0)
        self._is_pulled: Ints = np.zeros(0, np.int64)
        """1 once the decode unit has the request's KV."""
        self._tenant_to_number: dict[str, int] = {}
        self._tenant: Ints = np.zeros(0, np.int64)
        self._cost: Floats = np.zeros(0)
        """Cost of one output token for the request's tenant."""
        self._place: Ints = np.zeros(0, np.int64)
        """Scratch: index of the row in the current message. Meaningless afterwards."""
        self._grow(num_rows)

    def __len__(self) -> int:
        return len(self._records) - len(self._free)

    def begin(self, epoch: str) -> None:
        """Choose the start of this front's attempt ids from its epoch. Ids of two fronts are far
        apart: a unit may hold attempts of a dead front beside its successor's, and their tokens
        must not be mixed up.
        """
        self._num_given = int.from_bytes(blake2b(epoch.encode(), digest_size=8).digest()) >> (
            64 - _FIRST_BITS
        )

    def _grow(self, num_more: int) -> None:
        first = len(self._records)
        if first + num_more > MAX_ROWS:
            raise InvariantError(f"more than {MAX_ROWS} requests are in decode.")
        self._records += [None] * num_more
        self._free += range(first + num_more - 1, first - 1, -1)
        for name in (
            "_attempt_id",
            "_unit",
            "_num_prompt",
            "_num_output",
            "_num_blocks",
            "_moved_s",
            "_is_pulled",
            "_tenant",
            "_cost",
            "_place",
        ):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(num_more, column.dtype)]))

    def enter(self, record: Record) -> int:
        """Add an attempt and return its attempt id. Its tokens now come from `record.decode_unit`."""
        if record.row >= 0 or record.decode_unit is None:
            raise InvariantError(f"{record.request_id} cannot enter.")
        if not self._free:
            self._grow(len(self._records))
        row = record.row = self._free.pop()
        self._num_given += 1
        attempt_id = self._num_given << _ROW_BITS | row
        self._records[row] = record
        self._attempt_id[row] = attempt_id
        self._unit[row] = self._unit_to_number.setdefault(
            record.decode_unit, len(self._unit_to_number)
        )
        self._num_prompt[row] = len(record.generation.prompt)
        self._num_output[row] = record.num_output
        self._num_blocks[row] = record.num_blocks
        self._moved_s[row] = record.moved_s
        self._is_pulled[row] = False
        tenants = self._tenant_to_number
        self._tenant[row] = tenants.setdefault(record.generation.tenant, len(tenants))
        self._cost[row] = OUTPUT_COST / record.share_weight
        return attempt_id

    def pulled(self, record: Record) -> None:
        """Note that a record's KV has arrived."""
        self._is_pulled[record.row] = True

    def sync(self, record: Record) -> None:
        """Update a record from its row, if it runs."""
        if record.row >= 0:
            record.num_output = int(self._num_output[record.row])
            record.num_blocks = int(self._num_blocks[record.row])
            record.moved_s = float(self._moved_s[record.row])

    def leave(self, record: Record) -> None:
        """Remove an attempt, if it runs, and update its record. Its later tokens are unknown."""
        if record.row < 0:
            return
        self.sync(record)
        self._attempt_id[record.row] = 0
        self._records[record.row] = None
        self._free.append(record.row)
        record.row = _NOBODY

    def attempt_id_of(self, record: Record) -> int:
        """Return the attempt id of a running record."""
        return int(self._attempt_id[record.row])

    def record_of(self, attempt_id: int) -> Record:
        """Return the record of a running attempt id."""
        record = self._records[attempt_id & (MAX_ROWS - 1)]
        assert record is not None
        return record

    def early(self, message: Tokens) -> list[Record]:
        """Return requests with tokens in the message for which no Pulled has been received."""
        attempt_ids = np.frombuffer(message.attempt_ids, np.int64)
        rows, known = self._rows(message.unit, attempt_ids)
        early = attempt_ids[known & (self._is_pulled[rows] == 0)].tolist()
        return [self.record_of(attempt_id) for attempt_id in dict.fromkeys(early)]

    def take(self, now_s: float, message: Tokens) -> Taken:
        """Count the tokens that are the next ones of their attempts."""
        attempt_ids = np.frombuffer(message.attempt_ids, np.int64)
        indices = np.frombuffer(message.indices, np.int64)
        rows, known = self._rows(message.unit, attempt_ids)
        ahead = indices - self._num_output[rows]
        are_repeated = self._are_repeated(rows)
        if are_repeated:
            ahead, is_over = _as_if_one_by_one(attempt_ids, ahead, message.finishes)
            known &= ~is_over
        good = np.flatnonzero(known & (ahead == 0))
        counted = rows[good]
        np.add.at(self._num_output, counted, 1)
        self._moved_s[counted] = now_s
        # A block is reserved one token early, so that the next token always fits.
        full = (self._num_prompt[counted] + indices[good] + 1) % BLOCK_TOKENS == 0
        np.add.at(self._num_blocks, counted[full], 1)
        gaps: list[Record] = []
        unknown: list[int] = []
        if good.size < attempt_ids.size:
            ending = {row for row, _ in message.finishes}
            gaps = [
                self.record_of(int(attempt_ids[at]))
                for at in np.flatnonzero(known & (ahead > 0)).tolist()
            ]
            unknown = [
                int(attempt_ids[at]) for at in np.flatnonzero(~known).tolist() if at not in ending
            ]
        return Taken(
            good,
            tuple(gaps),
            tuple(dict.fromkeys(unknown)),
            int(np.count_nonzero(full)),
            np.unique(counted).size if are_repeated else good.size,
            self._served(counted),
        )

    def _served(self, rows: Ints) -> tuple[Served, ...]:
        """Return tokens and costs per tenant for one token in each of these rows."""
        if not rows.size:
            return ()
        numbers = self._tenant[rows]
        nums = np.bincount(numbers, minlength=len(self._tenant_to_number)).tolist()
        costs = np.bincount(numbers, self._cost[rows], len(nums)).tolist()
        return tuple(
            Served(tenant, num, cost)
            for tenant, num, cost in zip(self._tenant_to_number, nums, costs, strict=True)
            if num
        )

    def _rows(self, unit: str, attempt_ids: Ints) -> tuple[Ints, Bools]:
        """Return the rows of attempt ids, and whether each attempt runs now on this unit."""
        # A row beyond the last is looked up in the last one, which has another attempt id.
        rows = np.minimum(attempt_ids & (MAX_ROWS - 1), len(self._records) - 1)
        number = self._unit_to_number.get(unit, _NOBODY)
        known: Bools = (self._attempt_id[rows] == attempt_ids) & (self._unit[rows] == number)
        return rows, known

    def _are_repeated(self, rows: Ints) -> bool:
        """Return whether a row occurs more than once."""
        places = np.arange(rows.size)
        self._place[rows] = places
        return bool((self._place[rows] != places).any())

    def check(self) -> list[str]:
        """Return problems; empty if rows and records agree."""
        problems = []
        rows = zip(self._attempt_id.tolist(), self._unit.tolist(), self._records, strict=True)
        for row, (attempt_id, number, record) in enumerate(rows):
            if (record is None) != (attempt_id == 0):
                problems.append(
                    f"row {row} has attempt id {attempt_id} and {record and record.request_id}"
                )
            if record is None:
                continue
            if record.row != row:
                problems.append(f"{record.request_id} is in row {row} and says {record.row}")
            if self._unit_to_number.get(record.decode_unit or "") != number:
                problems.append(
                    f"{record.request_id} is on {record.decode_unit}, and its row on another"
                )
        if len(self._free) != self._records.count(None):
            problems.append("the free rows are not those without a record")
        return problems


def _as_if_one_by_one(
    attempt_ids: Ints, ahead: Ints, finishes: tuple[tuple[int, str], ...]
) -> tuple[Ints, Bools]:
    """Return, for each of N rows, its distance from the token that its attempt expects after the
    rows before it, and whether the attempt is over by then: after its last token, or after a gap.

    `ahead` is that distance before any row is counted.
    """
    num_rows = attempt_ids.size
    order = np.argsort(attempt_ids, kind="stable")
    begins = np.diff(attempt_ids[order], prepend=attempt_ids[order[:1]] - 1) != 0
    group = np.cumsum(begins) - 1
    # Up to a gap, an attempt expects the token behind the furthest one so far. Without a gap no row
    # is more than N ahead, so N + 2 per group keeps a group's values above the previous group's.
    came = np.clip(ahead[order], -1, num_rows) + 1 + group * (num_rows + 2)
    furthest = np.maximum.accumulate(came)
    waited = np.where(begins, 0, np.roll(furthest, 1) - group * (num_rows + 2))
    gap = ahead[order] - waited
    is_end = (gap > 0) | ((gap == 0) & np.isin(order, [row for row, _ in finishes]))
    num_before = np.cumsum(is_end) - is_end
    is_over = num_before > num_before[begins][group]
    places = np.argsort(order)
    return gap[places], is_over[places]

"""Requests that decode units work on, as arrays: a step's tokens of a whole unit are counted in a
few operations.

    Decode is sent: seat -> a ticket | Tokens: take ... take | it ends, is lost or given up: leave

A ticket names an attempt by the row that it has here and is never given out twice, nor by another
front, so what comes late of an attempt that has left finds nothing. While it is seated, what grows
with every token is here and not in its record. Knows no messages but Tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from hadal.core.errors import InvariantError
from hadal.core.messages import BLOCK_TOKENS, Tokens
from hadal.roles.front_record import Record

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_ROW_BITS = 24
_NOBODY = -1
MAX_ROWS = 1 << _ROW_BITS
_FIRST_BITS = 38
"""Of the number of a front's first ticket: as many again fit into what a row leaves of 63 bits."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of one Tokens message. The others of its rows are of attempts that left, or came
    before.
    """

    good: Ints
    """Its rows that are the next token of their attempt, in order: counted."""
    gaps: tuple[Record, ...]
    """Attempts of which a token is missing."""
    strangers: tuple[int, ...]
    """Tickets of attempts that have left, or are another unit's, and go on there."""
    num_blocks: int
    """That the requests of the unit grew by."""


class Running:
    """Rows of the seated. Grows by itself, up to MAX_ROWS at once."""

    def __init__(self, num_rows: int = 32) -> None:
        self._free: list[int] = []
        self._records: list[Record | None] = []
        self._num_given = 0
        self._unit_to_number: dict[str, int] = {}
        self._ticket: Ints = np.zeros(0, np.int64)
        """0: the row is free."""
        self._unit: Ints = np.zeros(0, np.int64)
        self._num_prompt: Ints = np.zeros(0, np.int64)
        self._num_output: Ints = np.zeros(0, np.int64)
        self._num_blocks: Ints = np.zeros(0, np.int64)
        self._is_pulled: Ints = np.zeros(0, np.int64)
        """Its KV is where its tokens come from."""
        self._grow(num_rows)

    def __len__(self) -> int:
        return len(self._records) - len(self._free)

    def begin(self, epoch: str) -> None:
        """Give out this front's tickets. Those of two are far apart: a unit may have attempts of
        one that died beside its successor's, and neither's text may ever be taken for the other's.
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
        for name in ("_ticket", "_unit", "_num_prompt", "_num_output", "_num_blocks", "_is_pulled"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(num_more, np.int64)]))

    def seat(self, record: Record) -> int:
        """Its tokens come from `record.decode_unit` from now on; returns the ticket to know them
        by.
        """
        if record.row >= 0 or record.decode_unit is None:
            raise InvariantError(f"{record.request_id} cannot be seated.")
        if not self._free:
            self._grow(len(self._records))
        row = record.row = self._free.pop()
        self._num_given += 1
        ticket = self._num_given << _ROW_BITS | row
        self._records[row] = record
        self._ticket[row] = ticket
        self._unit[row] = self._unit_to_number.setdefault(
            record.decode_unit, len(self._unit_to_number)
        )
        self._num_prompt[row] = len(record.generation.prompt)
        self._num_output[row] = record.num_output
        self._num_blocks[row] = record.num_blocks
        self._is_pulled[row] = False
        return ticket

    def pulled(self, record: Record) -> None:
        """Its KV has arrived."""
        self._is_pulled[record.row] = True

    def sync(self, record: Record) -> None:
        """Bring a record up to date, if it is seated."""
        if record.row >= 0:
            record.num_output = int(self._num_output[record.row])
            record.num_blocks = int(self._num_blocks[record.row])

    def leave(self, record: Record) -> None:
        """None of its tokens is waited for any more. The record is up to date."""
        if record.row < 0:
            return
        self.sync(record)
        self._ticket[record.row] = 0
        self._records[record.row] = None
        self._free.append(record.row)
        record.row = _NOBODY

    def ticket_of(self, record: Record) -> int:
        """The ticket of one that is seated."""
        return int(self._ticket[record.row])

    def record_of(self, ticket: int) -> Record:
        """Whose ticket it is: of one that was taken."""
        record = self._records[ticket & (MAX_ROWS - 1)]
        assert record is not None
        return record

    def early(self, message: Tokens) -> list[Record]:
        """Of whom tokens come though nobody said that their KV was pulled."""
        tickets = np.frombuffer(message.tickets, np.int64)
        rows, known = self._rows(message.unit, tickets)
        return [
            self.record_of(ticket)
            for ticket in tickets[known & (self._is_pulled[rows] == 0)].tolist()
        ]

    def take(self, message: Tokens) -> Taken:
        """Count the tokens that are what comes next."""
        tickets = np.frombuffer(message.tickets, np.int64)
        indices = np.frombuffer(message.indices, np.int64)
        rows, known = self._rows(message.unit, tickets)
        ahead = indices - self._num_output[rows]
        is_next: Bools = known & (ahead == 0)
        good = np.flatnonzero(is_next)
        counted = rows[good]
        self._num_output[counted] += 1
        # A block is taken with the token before its first: there has to be room for the one that
        # comes.
        full = (self._num_prompt[counted] + self._num_output[counted]) % BLOCK_TOKENS == 0
        self._num_blocks[counted] += full
        gaps: list[Record] = []
        strangers: list[int] = []
        if good.size < tickets.size:
            ending = {row for row, _ in message.finishes}
            gaps = [
                self.record_of(int(tickets[at]))
                for at in np.flatnonzero(known & (ahead > 0)).tolist()
            ]
            strangers = [
                int(tickets[at]) for at in np.flatnonzero(~known).tolist() if at not in ending
            ]
        return Taken(good, tuple(gaps), tuple(strangers), int(np.count_nonzero(full)))

    def _rows(self, unit: str, tickets: Ints) -> tuple[Ints, Bools]:
        """The rows that tickets name, and whether these attempts are seated there now, on this
        unit.
        """
        rows = tickets & (MAX_ROWS - 1)
        known: Bools = rows < len(self._records)
        rows = np.where(known, rows, 0)
        number = self._unit_to_number.get(unit, _NOBODY)
        known &= (self._ticket[rows] == tickets) & (self._unit[rows] == number)
        return rows, known

    def check(self) -> list[str]:
        """Problems; empty when rows and records agree."""
        problems = []
        rows = zip(self._ticket.tolist(), self._unit.tolist(), self._records, strict=True)
        for row, (ticket, number, record) in enumerate(rows):
            if (record is None) != (ticket == 0):
                problems.append(f"row {row} has ticket {ticket} and {record and record.request_id}")
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

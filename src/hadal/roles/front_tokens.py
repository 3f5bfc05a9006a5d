"""What comes of a decode unit's tokens: counted for the unit as a whole, told one by one to those
who read them.

Without text only the last token of a request is told, and none is kept. Changes the books of
requests and units; ending a request is the front's own affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hadal.core.front_snapshot import Totals
from hadal.core.messages import Token, Tokens
from hadal.core.seams import Deliver
from hadal.roles.front_record import Record
from hadal.roles.front_requests import RequestBook
from hadal.roles.front_running import Ints
from hadal.roles.front_units import UnitBook


@dataclass(frozen=True, slots=True)
class Came:
    """What the front has to do about a Tokens message."""

    delivers: tuple[Deliver, ...]
    """To requests that go on."""
    ended: tuple[tuple[Record, Token], ...]
    """Requests that drew their last token; their decode unit holds nothing of them."""
    gaps: tuple[Record, ...]
    """Requests of which a token is missing."""
    strangers: tuple[int, ...]
    """Tickets of attempts that nobody waits for."""


class FrontTokens:
    """`epoch`: the front's; tickets of another one are strangers here."""

    def __init__(
        self,
        requests: RequestBook,
        units: UnitBook,
        totals: Totals,
        *,
        epoch: str,
        keeps_text: bool,
    ) -> None:
        requests.running.begin(epoch)
        self._requests = requests
        self._units = units
        self._totals = totals
        self._keeps_text = keeps_text

    def early(self, message: Tokens) -> list[Record]:
        """Requests whose tokens come though nobody said that their KV was pulled."""
        return self._requests.running.early(message)

    def take(self, message: Tokens) -> Came:
        """Count a message's tokens."""
        taken = self._requests.running.take(message)
        self._totals.tokens_out += taken.good.size
        self._requests.num_blocks_placed += taken.num_blocks
        self._units.grew(message.unit, taken.num_blocks)
        delivers: list[Deliver] = []
        ended: list[tuple[Record, Token]] = []
        for record, token in self._rows(message, taken.good):
            if token.finish is None:
                delivers.append(Deliver(token.request_id, (token,)))
                continue
            self._requests.running.leave(record)
            self._units.left_decode(message.unit, record.num_blocks)
            record.decode_unit = None
            ended.append((record, token))
        return Came(tuple(delivers), tuple(ended), taken.gaps, taken.strangers)

    def _rows(self, message: Tokens, good: Ints) -> Iterator[tuple[Record, Token]]:
        row_to_finish = dict(message.finishes)
        if not self._keeps_text:
            ends = np.array(sorted(row_to_finish), np.int64)
            good = ends[np.isin(ends, good)] if 8 * good.size < len(message.tickets) else ends
            if not good.size:
                return
        tickets, indices, values = (
            np.frombuffer(column, np.int64)[good].tolist()
            for column in (message.tickets, message.indices, message.values)
        )
        for row, ticket, index, value in zip(good.tolist(), tickets, indices, values, strict=True):
            record, draw = self._requests.running.record_of(ticket), message.draws.get(row)
            if self._keeps_text:
                record.output.append(value)
            logprob, top = (draw.logprob, draw.top) if draw is not None else (None, ())
            yield (
                record,
                Token(
                    record.request_id,
                    record.attempt,
                    index,
                    value,
                    row_to_finish.get(row),
                    logprob,
                    top,
                ),
            )

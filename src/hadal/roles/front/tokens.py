"""Tokens of decode units: counted per message, delivered per request.

Without text (`keeps_text` False), only a request's last token is delivered and none is stored.
Changes the tables of requests, units and tenants; the front itself ends a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hadal.core.arrays import Ints
from hadal.core.messages.generation import Deliver, Token
from hadal.core.messages.snapshot import Totals
from hadal.core.messages.units import Tokens
from hadal.roles.front.record import Record
from hadal.roles.front.requests import FrontRequests
from hadal.roles.front.tenants import FrontTenants
from hadal.roles.front.units import FrontUnits


@dataclass(frozen=True, slots=True)
class Came:
    """Results of a Tokens message for the front to act on."""

    delivers: tuple[Deliver, ...]
    """Deliveries to requests that continue."""
    ended: tuple[tuple[Record, tuple[Token, ...]], ...]
    """Requests that drew their last token, with their tokens of the message; the unit frees them.
    """
    gaps: tuple[Record, ...]
    """Requests with a missing token."""
    unknown: tuple[int, ...]
    """Ids of attempts that no request waits for; the unit must stop them."""


class FrontTokens:
    """Token counts and deliveries. `epoch` is this front's; another front's attempt ids are unknown."""

    def __init__(
        self,
        requests: FrontRequests,
        units: FrontUnits,
        tenants: FrontTenants,
        totals: Totals,
        *,
        epoch: str,
        keeps_text: bool,
    ) -> None:
        requests.running.begin(epoch)
        self._requests = requests
        self._units = units
        self._tenants = tenants
        self._totals = totals
        self._keeps_text = keeps_text

    def early(self, message: Tokens) -> list[Record]:
        """Return requests with tokens in the message for which no Pulled has been received."""
        return self._requests.running.early(message)

    def take(self, now_s: float, message: Tokens) -> Came:
        """Count a message's tokens, and return the deliveries and problems."""
        taken = self._requests.running.take(now_s, message)
        self._totals.tokens_out += taken.good.size
        for served in taken.served:
            self._requests.counters.charge(served.tenant, served.cost)
            self._tenants.draw(now_s, served.tenant, served.num_tokens)
        if taken.num_blocks:
            unit = self._units.by_name[message.unit]
            self._requests.placed_under(unit.fingerprint).num_blocks += taken.num_blocks
            self._units.grew(message.unit, taken.num_blocks)
        self._units.drew(message.unit, taken.good.size, taken.num_attempts)
        rows: Iterable[tuple[Record, tuple[Token, ...]]] = self._rows(message, taken.good)
        if taken.num_attempts < taken.good.size:
            rows = by_request(rows)
        delivers: list[Deliver] = []
        ended: list[tuple[Record, tuple[Token, ...]]] = []
        for record, tokens in rows:
            last = tokens[-1]
            if last.finish is None:
                delivers.append(Deliver(last.request_id, tokens))
                continue
            self._requests.running.leave(record)
            self._units.left_decode(message.unit, record.num_blocks)
            record.decode_unit = None
            ended.append((record, tokens))
        return Came(tuple(delivers), tuple(ended), taken.gaps, taken.unknown)

    def _rows(self, message: Tokens, good: Ints) -> Iterator[tuple[Record, tuple[Token, ...]]]:
        row_to_finish = dict(message.finishes)
        if not self._keeps_text:
            ends = np.array(sorted(row_to_finish), np.int64)
            good = ends[np.isin(ends, good)] if 8 * good.size < len(message.attempt_ids) else ends
            if not good.size:
                return
        attempt_ids, indices, values = (
            np.frombuffer(column, np.int64)[good].tolist()
            for column in (message.attempt_ids, message.indices, message.values)
        )
        for row, attempt_id, index, value in zip(
            good.tolist(), attempt_ids, indices, values, strict=True
        ):
            record, draw = self._requests.running.record_of(attempt_id), message.draws.get(row)
            if self._keeps_text:
                record.output.append(value)
            logprob, top = (draw.logprob, draw.top) if draw is not None else (None, ())
            yield (
                record,
                (
                    Token(
                        record.request_id,
                        record.attempt,
                        index,
                        value,
                        row_to_finish.get(row),
                        logprob,
                        top,
                    ),
                ),
            )


def by_request(
    rows: Iterable[tuple[Record, tuple[Token, ...]]],
) -> Iterator[tuple[Record, tuple[Token, ...]]]:
    """Yield each request's tokens together, in order, for one Deliver per request and step."""
    together: dict[str, tuple[Record, list[Token]]] = {}
    for record, tokens in rows:
        together.setdefault(record.request_id, (record, []))[1].extend(tokens)
    for record, tokens_so_far in together.values():
        yield record, tuple(tokens_so_far)

"""Every request the front holds: its state, its owners, all its output so far, and the queue of
those that wait.

A state changes only through core/request.py's table. Knows neither units nor messages.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush, merge
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hadal.core.cache import num_names
from hadal.core.config import CacheConfig
from hadal.core.errors import InvariantError
from hadal.core.messages import BLOCK_TOKENS, Generation, Tokens
from hadal.core.request import OWNS, State, Transition, next_state
from hadal.core.seams import Closing
from hadal.kv.blocks import blocks_for
from hadal.kv.names import extend, root_of
from hadal.policy.admission import turn_s
from hadal.policy.fairness import (
    INPUT_COST,
    OUTPUT_COST,
    ServiceCounters,
    is_batch,
    share_weight,
    turn_of,
)
from hadal.policy.views import TenantView

# One request as the front knows it, from Submit to its last Deliver.


QueueKey = tuple[float, int, str]
"""A place in the queue: whose turn is first, then who came first."""


@dataclass(slots=True)
class Record:
    """One request from Submit to its last Deliver."""

    generation: Generation
    number: int
    """The request's number in the order of arrival."""
    timeout_s: float
    """Longest wait: in the queue, for the first token, and for each token after."""
    moved_s: float
    """Time of its last token, or of its arrival. While the request runs, `Running` has the newest."""
    output: list[int]
    """Tokens so far; empty where the front keeps no text."""
    num_output: int = 0
    """Tokens so far. While it runs, `Running` counts this and `num_blocks`."""
    state: State = State.QUEUED
    attempt: int = 0
    prefill_unit: str | None = None
    decode_unit: str | None = None
    last_units: tuple[str, str] = ("", "")
    """Prefill and decode units of the attempt that was placed last; empty: none."""
    num_cached: int = 0
    """Positions that its prefill unit was taken to have when it was sent there."""
    not_before_s: float = 0.0
    num_retries: int = 0
    is_fitted: bool = False
    """`max_tokens` was checked against what the units can hold."""
    num_blocks: int = 0
    """Counted against decode while it is placed: its tokens and the one that comes."""
    num_blocks_taken: int = 0
    """Held by what gave way to it, since it waits."""
    is_charged: bool = False
    """Its prompt counts as served to its tenant: a retry's is work again, but not the tenant's."""
    row: int = -1
    """Row among the requests that run; negative: none."""
    chains: dict[str, bytes] = field(default_factory=dict)
    """Fingerprint -> the chain of its text, of those that it was bound to before."""

    @property
    def fingerprint(self) -> str:
        """What it is bound to from being placed on: KV of no other is used for it. Bound anew when
        it is placed again, for then all of its text is prefilled again.
        """
        return self.generation.fingerprint

    def bind(self, fingerprint: str) -> None:
        """Bind one that waits."""
        generation = self.generation
        if generation.fingerprint == fingerprint:
            return
        self.chains[generation.fingerprint] = generation.chain
        chain = self.chains.get(fingerprint, b"")
        self.generation = msgspec.structs.replace(generation, chain=chain, fingerprint=fingerprint)

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def queue_key(self) -> QueueKey:
        """Key that orders the queue; the same when the request comes back."""
        return (
            turn_s(self.generation.arrived_s, self.generation.priority),
            self.number,
            self.request_id,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.generation.prompt) + self.num_output

    @property
    def share_weight(self) -> float:
        """What its work is divided by where tenants share (policy/fairness)."""
        return share_weight(self.generation.weight, self.generation.priority)

    @property
    def closing(self) -> Closing:
        return Closing(*self.last_units, self.attempt - self.generation.attempt)


# Requests that decode units work on, as arrays: a step's tokens of a whole unit are counted in a
# few operations.
#
#     Decode is sent: enter -> an attempt id | Tokens: take ... take | it ends or is given up: leave
#
# A message may have several tokens of an attempt. It is taken as if each of its rows came by itself.
#
# An attempt id holds the row that its attempt has here. It is never given out twice, nor by another
# front, so what comes late of an attempt that has left finds nothing. While an attempt runs, what
# grows with every token is here and not in its record. Knows no messages but Tokens.


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_ROW_BITS = 24
_NOBODY = -1
MAX_ROWS = 1 << _ROW_BITS
_FIRST_BITS = 38
"""Bits of the number in a front's first attempt id. A row leaves 39 of 63 bits for it, so that as
many numbers again can follow.
"""


class Served(NamedTuple):
    """Tokens that were drawn for a tenant."""

    tenant: str
    num_tokens: int
    cost: float
    """Over its weight (policy/fairness)."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of one Tokens message. The others of its rows are of attempts that left, or came
    before.
    """

    good: Ints
    """Rows of the message that are the next token of their attempt, in order; they were counted."""
    gaps: tuple[Record, ...]
    """Attempts of which a token is missing."""
    unknown: tuple[int, ...]
    """Ids of attempts that have left, or are another unit's, and go on there; what comes behind an
    attempt's last token or a gap is of one that has left.
    """
    num_blocks: int
    """Blocks that the requests of the unit grew by."""
    num_attempts: int
    """Attempts that the good rows are of."""
    served: tuple[Served, ...] = ()
    """What tenants had of the good rows."""


class Running:
    """Rows of those that run. Grows by itself, up to MAX_ROWS at once."""

    def __init__(self, num_rows: int = 32) -> None:
        self._free: list[int] = []
        self._records: list[Record | None] = []
        self._num_given = 0
        self._unit_to_number: dict[str, int] = {}
        self._attempt_id: Ints = np.zeros(0, np.int64)
        """0: the row is free."""
        self._unit: Ints = np.zeros(0, np.int64)
        self._num_prompt: Ints = np.zeros(0, np.int64)
        self._num_output: Ints = np.zeros(0, np.int64)
        self._num_blocks: Ints = np.zeros(0, np.int64)
        self._moved_s: Floats = np.zeros(0)
        self._is_pulled: Ints = np.zeros(0, np.int64)
        """Whether its KV is where its tokens come from."""
        self._tenant_to_number: dict[str, int] = {}
        self._tenant: Ints = np.zeros(0, np.int64)
        self._cost: Floats = np.zeros(0)
        """Of a token."""
        self._place: Ints = np.zeros(0, np.int64)
        """Where a message that is being looked at names the row. Means nothing afterwards."""
        self._grow(num_rows)

    def __len__(self) -> int:
        return len(self._records) - len(self._free)

    def begin(self, epoch: str) -> None:
        """Give out this front's attempt ids. Those of two fronts are far apart: a unit may have
        attempts of one that died beside its successor's, and neither's text may ever be taken for
        the other's.
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
        """Let an attempt run: its tokens come from `record.decode_unit` from now on, under the
        attempt id that is returned.
        """
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
        """A record's KV has arrived."""
        self._is_pulled[record.row] = True

    def sync(self, record: Record) -> None:
        """Bring a record up to date, if it runs."""
        if record.row >= 0:
            record.num_output = int(self._num_output[record.row])
            record.num_blocks = int(self._num_blocks[record.row])
            record.moved_s = float(self._moved_s[record.row])

    def leave(self, record: Record) -> None:
        """None of its tokens is waited for any more. The record is up to date."""
        if record.row < 0:
            return
        self.sync(record)
        self._attempt_id[record.row] = 0
        self._records[record.row] = None
        self._free.append(record.row)
        record.row = _NOBODY

    def attempt_id_of(self, record: Record) -> int:
        """The attempt id of a record that runs."""
        return int(self._attempt_id[record.row])

    def record_of(self, attempt_id: int) -> Record:
        """The record that runs under an attempt id, which must be one of `take`'s."""
        record = self._records[attempt_id & (MAX_ROWS - 1)]
        assert record is not None
        return record

    def early(self, message: Tokens) -> list[Record]:
        """Requests whose tokens come though nobody said that their KV was pulled."""
        attempt_ids = np.frombuffer(message.attempt_ids, np.int64)
        rows, known = self._rows(message.unit, attempt_ids)
        early = attempt_ids[known & (self._is_pulled[rows] == 0)].tolist()
        return [self.record_of(attempt_id) for attempt_id in dict.fromkeys(early)]

    def take(self, now_s: float, message: Tokens) -> Taken:
        """Count the tokens that are what comes next."""
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
        # A block is taken with the token before its first: there has to be room for the one that
        # comes.
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
        """What a token for each of these rows is to tenants."""
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
        """The rows that attempt ids name, and whether these attempts run there now, on this
        unit.
        """
        # One beyond the last row is looked for in that one, which has another attempt id.
        rows = np.minimum(attempt_ids & (MAX_ROWS - 1), len(self._records) - 1)
        number = self._unit_to_number.get(unit, _NOBODY)
        known: Bools = (self._attempt_id[rows] == attempt_ids) & (self._unit[rows] == number)
        return rows, known

    def _are_repeated(self, rows: Ints) -> bool:
        """Whether a row is named more than once."""
        places = np.arange(rows.size)
        self._place[rows] = places
        return bool((self._place[rows] != places).any())

    def check(self) -> list[str]:
        """Problems; empty when rows and records agree."""
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
    """For each of N rows: how far it is ahead of what its attempt waits for once the rows before it
    were taken, and whether its attempt is over by then, as it drew its last token or left one out.

    `ahead` is what it would be if no row were taken.
    """
    num_rows = attempt_ids.size
    order = np.argsort(attempt_ids, kind="stable")
    begins = np.diff(attempt_ids[order], prepend=attempt_ids[order[:1]] - 1) != 0
    group = np.cumsum(begins) - 1
    # Up to a gap, what an attempt waits for is behind the furthest token that came. Nothing is
    # further ahead than by N without a gap, and a group's numbers are above those of the one before.
    came = np.clip(ahead[order], -1, num_rows) + 1 + group * (num_rows + 2)
    furthest = np.maximum.accumulate(came)
    waited = np.where(begins, 0, np.roll(furthest, 1) - group * (num_rows + 2))
    gap = ahead[order] - waited
    is_end = (gap > 0) | ((gap == 0) & np.isin(order, [row for row, _ in finishes]))
    num_before = np.cumsum(is_end) - is_end
    is_over = num_before > num_before[begins][group]
    places = np.argsort(order)
    return gap[places], is_over[places]


PLACED = (State.PREFILLING, State.TRANSFERRING, State.DECODING)
"""States in which a unit works, or will, for the request."""
_OWNED: dict[tuple[bool, bool], frozenset[str]] = {
    (False, False): frozenset(),
    (True, False): frozenset({"prefill_unit"}),
    (False, True): frozenset({"decode_unit"}),
    (True, True): frozenset({"prefill_unit", "decode_unit"}),
}
"""Whether a record names a prefill unit, and a decode unit -> what it owns."""


@dataclass(slots=True)
class Placed:
    """Sums over the requests that units work on whose KV is of one fingerprint."""

    num_requests: int = 0
    num_blocks: int = 0
    num_transferring: int = 0
    tenant_to_num: Counter[str] = field(default_factory=Counter)


_NONE = Placed()


@dataclass(slots=True)
class FrontRequests:
    """Requests by id, in the order of arrival, with the queue and the sums the policies need."""

    by_id: dict[str, Record] = field(default_factory=dict)
    counts: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    fingerprint_to_placed: dict[str, Placed] = field(default_factory=dict)
    """A fingerprint that no request is bound to is not in it."""
    running: Running = field(default_factory=Running)
    """Those in decode."""
    _tenant_to_queue: dict[str, list[QueueKey]] = field(default_factory=dict)
    """Queue keys of those that wait, in their order. A tenant of whom nobody waits is not in it."""
    tenant_to_placed: Counter[str] = field(default_factory=Counter)
    """How many of a tenant's requests units work on, of all fingerprints."""
    counters: ServiceCounters = field(default_factory=ServiceCounters)
    """What tenants were served: by it they take turns."""
    tenant_to_open: Counter[str] = field(default_factory=Counter)
    """How many of a tenant's requests there are."""
    _tenant_to_weight: dict[str, float] = field(default_factory=dict)
    """Of those tenants, as the last request has it."""
    _num_arrived: int = 0
    _deadlines: list[tuple[float, int, str]] = field(default_factory=list)
    """Heap of (time to look at a request, its number, its id). It may have progressed or ended by then."""

    @property
    def num_placed(self) -> int:
        return sum(self.counts[state] for state in PLACED)

    @property
    def num_blocks_placed(self) -> int:
        return sum(placed.num_blocks for placed in self.fingerprint_to_placed.values())

    @property
    def num_waiting(self) -> int:
        """How many wait, those of batches left out."""
        queues = self._tenant_to_queue.items()
        return sum(len(queue) for tenant, queue in queues if not is_batch(tenant))

    @property
    def num_placed_of_batches(self) -> int:
        """How many of batches' requests units work on."""
        return sum(num for tenant, num in self.tenant_to_placed.items() if is_batch(tenant))

    def placed_of_batches(self) -> list[Record]:
        """Those, the latest last."""
        if not self.num_placed_of_batches:
            return []
        return [
            record
            for record in self.by_id.values()
            if record.state in PLACED and is_batch(record.generation.tenant)
        ]

    def has_others_placed(self, tenant: str) -> bool:
        """Whether units work on requests of any other tenant, batches' among them."""
        return len(self.tenant_to_placed) > (tenant in self.tenant_to_placed)

    def last_of(self, tenant: str, may_go: Callable[[Record], bool]) -> Record | None:
        """The last in its order of a tenant's requests that units work on and that may go, its first
        of all apart.
        """
        placed = sorted(
            (record for record in self.placed() if record.generation.tenant == tenant),
            key=lambda record: record.queue_key,
        )
        return next((record for record in reversed(placed[1:]) if may_go(record)), None)

    def tenant_view(self, tenant: str) -> TenantView:
        """What policy/fairness sees of a tenant that has requests here."""
        return TenantView(
            tenant,
            self.counters[tenant],
            self._tenant_to_weight[tenant],
            self.tenant_to_placed[tenant],
            tenant in self._tenant_to_queue,
        )

    def num_queued_of(self, tenant: str) -> int:
        """How many of a tenant's requests wait."""
        return len(self._tenant_to_queue.get(tenant, ()))

    def num_tenants_with(self, tenant: str) -> int:
        """How many tenants have requests that wait, this one counted in any case."""
        return len({name for name in self._tenant_to_queue if not is_batch(name)} | {tenant})

    def has_fewer(self, tenant: str, fingerprint: str) -> bool:
        """Whether a tenant has fewer requests placed under a fingerprint than another, over their
        weights. A batch never has.
        """
        placed, weights = self.placed_under(fingerprint).tenant_to_num, self._tenant_to_weight
        if is_batch(tenant):
            return False
        held = placed[tenant] / weights.get(tenant, 1.0)
        return any(num / weights[other] > held for other, num in placed.items())

    def add(self, generation: Generation, timeout_s: float, *, keeps_text: bool = True) -> Record:
        """A new request, queued behind all whose turn is before its own (policy/admission).
        `keeps_text`: see Front.
        """
        output = list(generation.output) if keeps_text else []
        record = Record(
            generation,
            self._num_arrived,
            timeout_s,
            generation.arrived_s,
            output,
            len(generation.output),
            attempt=generation.attempt,
        )
        self._num_arrived += 1
        heappush(self._deadlines, (record.moved_s + timeout_s, record.number, record.request_id))
        self.by_id[record.request_id] = record
        self.counts[State.QUEUED] += 1
        self.tenant_to_open[generation.tenant] += 1
        self._tenant_to_weight[generation.tenant] = generation.weight
        self._enqueue(record)
        return record

    def move(self, record: Record, move: Transition) -> None:
        """Walk the life's table; raises InvariantError for a move that cannot happen. An ended
        request is forgotten.
        """
        before, after = record.state, next_state(record.state, move)
        record.state = after
        self.counts[before] -= 1
        self.counts[after] += 1
        if before is State.QUEUED:
            self._dequeue(record)
        if after is State.QUEUED:
            self._enqueue(record)
        if after not in PLACED:
            self.running.leave(record)
        if State.TRANSFERRING in (before, after):
            placed = self.fingerprint_to_placed[record.fingerprint]
            placed.num_transferring += 1 if after is State.TRANSFERRING else -1
        if before not in PLACED and after in PLACED:
            record.num_blocks_taken = 0
            record.num_blocks = blocks_for(record.num_tokens + 1)
            self._count_placed(record, 1)
        elif before in PLACED and after not in PLACED:
            self._count_placed(record, -1)
        if after in (State.FINISHED, State.CANCELLED):
            self.counts[after] -= 1
            del self.by_id[record.request_id]
            self.tenant_to_open[record.generation.tenant] -= 1
            if not self.tenant_to_open[record.generation.tenant]:
                del self.tenant_to_open[record.generation.tenant]
                del self._tenant_to_weight[record.generation.tenant]

    def _count_placed(self, record: Record, change: int) -> None:
        """Count a request in, or out again with all that it has become."""
        tenant, fingerprint = record.generation.tenant, record.fingerprint
        placed = self.fingerprint_to_placed.get(fingerprint)
        if placed is None:
            placed = self.fingerprint_to_placed[fingerprint] = Placed()
        placed.num_requests += change
        placed.num_blocks += change * record.num_blocks
        for tenant_to_num in (self.tenant_to_placed, placed.tenant_to_num):
            tenant_to_num[tenant] += change
            if not tenant_to_num[tenant]:
                del tenant_to_num[tenant]
        if not placed.num_requests:
            del self.fingerprint_to_placed[fingerprint]

    def placed_under(self, fingerprint: str) -> Placed:
        """The sums over those that are bound to a fingerprint."""
        return self.fingerprint_to_placed.get(fingerprint, _NONE)

    def grow(self, record: Record) -> None:
        """Count its first token of this attempt, and the block that it may need."""
        record.num_output += 1
        self.counters.charge(record.generation.tenant, OUTPUT_COST / record.share_weight)
        grown = blocks_for(record.num_tokens + 1) - record.num_blocks
        if grown:
            record.num_blocks += grown
            self.fingerprint_to_placed[record.fingerprint].num_blocks += grown

    def next_queued(self, now_s: float) -> Record | None:
        """Whose turn it is (policy/fairness), of those that wait and are not backing off."""
        heads = [
            head
            for queue in self._tenant_to_queue.values()
            if (head := self._head(queue, now_s)) is not None
        ]
        return min(heads, key=self._turn, default=None)

    def _turn(self, head: Record) -> tuple[bool, float, int, QueueKey]:
        tenant = head.generation.tenant
        num_placed = self.tenant_to_placed[tenant]
        return turn_of(tenant, self.counters[tenant], num_placed, head.queue_key)

    def charge_prompt(self, record: Record) -> None:
        """A unit begins with a request: what it has to read of the prompt is its tenant's."""
        if not record.is_charged:
            record.is_charged = True
            num_read = len(record.generation.prompt) - record.num_cached
            self.counters.charge(
                record.generation.tenant, INPUT_COST * max(0, num_read) / record.share_weight
            )

    def _head(self, queue: list[QueueKey], now_s: float) -> Record | None:
        for _, _, request_id in queue:
            record = self.by_id[request_id]
            if record.not_before_s <= now_s:
                return record
        return None

    def _enqueue(self, record: Record) -> None:
        tenant = record.generation.tenant
        if tenant not in self._tenant_to_queue:
            self.counters.join(tenant, self._tenant_to_queue.keys())
        insort(self._tenant_to_queue.setdefault(tenant, []), record.queue_key)

    def _dequeue(self, record: Record) -> None:
        queue = self._tenant_to_queue[record.generation.tenant]
        del queue[bisect_left(queue, record.queue_key)]
        if not queue:
            del self._tenant_to_queue[record.generation.tenant]
            self.counters.leave(record.generation.tenant)

    def queued(self) -> list[Record]:
        """Those that wait, in the order of their queue keys."""
        return [
            self.by_id[request_id] for _, _, request_id in merge(*self._tenant_to_queue.values())
        ]

    def next_retry_s(self, now_s: float) -> float:
        """When the next back-off ends; infinity if nothing backs off."""
        waiting = chain.from_iterable(self._tenant_to_queue.values())
        times = [self.by_id[request_id].not_before_s for _, _, request_id in waiting]
        return min((time_s for time_s in times if time_s > now_s), default=math.inf)

    def overdue(self, now_s: float) -> list[Record]:
        """Return requests that have waited too long, each once. The caller ends them."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number, request_id = heappop(self._deadlines)
            record = self.by_id.get(request_id)
            if record is None or record.number != number:
                continue  # It has ended.
            self.running.sync(record)
            deadline_s = record.moved_s + record.timeout_s
            if deadline_s <= now_s:
                late.append(record)
            else:
                heappush(self._deadlines, (deadline_s, number, request_id))
        return late

    def on_unit(self, unit: str) -> list[Record]:
        """Requests that lose something if this unit is lost, the oldest first."""
        return [
            record
            for record in self.by_id.values()
            if unit in (record.prefill_unit, record.decode_unit)
        ]

    def placed(self) -> Iterator[Record]:
        return (record for record in self.by_id.values() if record.state in PLACED)

    def check(self) -> list[str]:
        """Problems of the requests; empty when states, owners, queue and sums agree."""
        problems = self.running.check()
        queues: dict[str, list[QueueKey]] = {}
        for record in self.by_id.values():
            self.running.sync(record)
            owns = _OWNED[record.prefill_unit is not None, record.decode_unit is not None]
            if owns != OWNS[record.state]:
                problems.append(f"{record.request_id} is {record.state} and owns {sorted(owns)}")
            if record.state is State.QUEUED:
                queues.setdefault(record.generation.tenant, []).append(record.queue_key)
            elif record.state in PLACED and record.num_blocks != blocks_for(record.num_tokens + 1):
                problems.append(
                    f"{record.request_id} counts {record.num_blocks} blocks for {record.num_tokens}"
                    " tokens"
                )
        if {tenant: sorted(queue) for tenant, queue in queues.items()} != self._tenant_to_queue:
            problems.append("the queue does not hold those that are queued")
        placed = list(self.placed())
        if self.fingerprint_to_placed != _summed(placed):
            problems.append("the sums of placed requests are wrong")
        if self.tenant_to_placed != Counter(record.generation.tenant for record in placed):
            problems.append("the counts of tenants' placed requests are wrong")
        if self.tenant_to_open != Counter(r.generation.tenant for r in self.by_id.values()):
            problems.append("the counts of tenants' requests are wrong")
        counts = Counter(record.state for record in self.by_id.values())
        for state in State:
            if self.counts[state] != counts[state]:
                problems.append(f"the count of {state} requests is wrong")
        return problems


def _summed(records: list[Record]) -> dict[str, Placed]:
    """What `fingerprint_to_placed` has to be where these are placed."""
    sums: defaultdict[str, Placed] = defaultdict(Placed)
    for record in records:
        placed = sums[record.fingerprint]
        placed.num_requests += 1
        placed.num_blocks += record.num_blocks
        placed.num_transferring += record.state is State.TRANSFERRING
        placed.tenant_to_num[record.generation.tenant] += 1
    return sums


# Names the blocks of a generation's text (kv/names), as far as that was not done already.
#
# Any thread may use it: the gateway names a long prompt where it tokenises it, under the fingerprint
# that it will probably be bound to, and the front what came since, or all of it under another.


class FrontNames:
    """None at all where nothing is cached."""

    def __init__(self, cache: CacheConfig, fingerprint: str) -> None:
        """`fingerprint` stands for all that KV depends on besides the text."""
        self.fingerprint = fingerprint
        """Under which a prompt that comes now is named."""
        self._is_on = cache.is_on
        self._fingerprint_to_root: dict[str, bytes] = {}

    def named(
        self,
        generation: Generation,
        output: Sequence[int] = (),
        fingerprint: str | None = None,
    ) -> Generation:
        """`generation` with a chain that names the full blocks of its prompt and `output` under a
        fingerprint: that of a prompt that comes now, if none is given. A chain under the same one
        grows and stays what it is; another is left behind. A prompt that is to be scored has no
        names: all of it is computed.

        A hash for each block that has no name yet, so milliseconds for a very long prompt and next
        to nothing after.
        """
        fingerprint = self.fingerprint if fingerprint is None else fingerprint
        is_same = generation.fingerprint == fingerprint
        chain = generation.chain if is_same else b""
        num_blocks = (len(generation.prompt) + len(output)) // BLOCK_TOKENS
        is_named = self._is_on and generation.sampling.num_prompt_logprobs < 0
        if is_named and num_names(chain) < num_blocks:
            text, root = generation.prompt + tuple(output), self._root_of(fingerprint)
            chain = extend(root, chain, text, generation.salt, generation.num_public)
        elif is_same:
            return generation
        return msgspec.structs.replace(generation, chain=chain, fingerprint=fingerprint)

    def _root_of(self, fingerprint: str) -> bytes:
        roots = self._fingerprint_to_root
        if fingerprint not in roots:
            roots[fingerprint] = root_of(fingerprint.encode())
        return roots[fingerprint]

"""Every request the front holds: its state, its owners, all its output so far, and the queue of
those that wait.

A state changes only through core/request.py's table. Knows neither units nor messages.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain

from hadal.core.messages import Generation
from hadal.core.request import MAY_OWN, OWNS, Move, State, next_state
from hadal.kv.blocks import blocks_for
from hadal.policy.batching import in_turns
from hadal.roles.front_record import Place, Record
from hadal.roles.front_running import Running

LATELY_S = 120.0
"""A tenant that sent something within this time is expected to send more."""
PLACED = (State.PREFILLING, State.TRANSFERRING, State.DECODING)
"""States in which a unit works, or will, for the request."""


@dataclass(slots=True)
class RequestBook:
    """Requests by id, in the order of arrival, with the queue and the sums the policies need."""

    by_id: dict[str, Record] = field(default_factory=dict)
    counts: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    num_blocks_placed: int = 0
    running: Running = field(default_factory=Running)
    """Those in decode."""
    _tenant_to_queue: dict[str, list[Place]] = field(default_factory=dict)
    """Places of those that wait, in their order. A tenant of whom nobody waits is not in it."""
    tenant_to_placed: Counter[str] = field(default_factory=Counter)
    """How many of a tenant's requests units work on."""
    tenant_to_seen_s: dict[str, float] = field(default_factory=dict)
    """When a tenant's last request came. One that sent none for LATELY_S is forgotten when the next
    request comes.
    """
    _num_arrived: int = 0

    @property
    def num_placed(self) -> int:
        return sum(self.counts[state] for state in PLACED)

    @property
    def num_queued(self) -> int:
        return self.counts[State.QUEUED]

    def num_queued_of(self, tenant: str) -> int:
        """How many of a tenant's requests wait."""
        return len(self._tenant_to_queue.get(tenant, ()))

    def num_tenants_with(self, tenant: str) -> int:
        """How many tenants have requests that wait, this one counted in any case."""
        return len(self._tenant_to_queue.keys() | {tenant})

    def num_tenants_absent(self, tenant: str) -> int:
        """How many others sent something lately of whom nobody waits now."""
        return len(self.tenant_to_seen_s.keys() - self._tenant_to_queue.keys() - {tenant})

    def add(self, generation: Generation, deadline_s: float, *, keeps_text: bool = True) -> Record:
        """A new request, queued behind all whose turn is before its own (policy/batching).
        `keeps_text`: see Front.
        """
        output = list(generation.output) if keeps_text else []
        record = Record(
            generation,
            self._num_arrived,
            deadline_s,
            output,
            len(generation.output),
            attempt=generation.attempt,
        )
        self._num_arrived += 1
        self.by_id[record.request_id] = record
        self.counts[State.QUEUED] += 1
        self._enqueue(record)
        self._saw(generation.tenant, generation.arrived_s)
        return record

    def _saw(self, tenant: str, now_s: float) -> None:
        """A tenant sent something. Those seen last are last."""
        seen_s = self.tenant_to_seen_s
        seen_s.pop(tenant, None)
        seen_s[tenant] = now_s
        while seen_s[first := next(iter(seen_s))] < now_s - LATELY_S:
            del seen_s[first]

    def move(self, record: Record, move: Move) -> None:
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
        if before not in PLACED and after in PLACED:
            record.num_blocks = blocks_for(record.num_tokens + 1)
            self.num_blocks_placed += record.num_blocks
            self.tenant_to_placed[record.generation.tenant] += 1
        elif before in PLACED and after not in PLACED:
            self.num_blocks_placed -= record.num_blocks
            self.tenant_to_placed[record.generation.tenant] -= 1
            if not self.tenant_to_placed[record.generation.tenant]:
                del self.tenant_to_placed[record.generation.tenant]
        if after in (State.FINISHED, State.CANCELLED):
            self.counts[after] -= 1
            del self.by_id[record.request_id]

    def grow(self, record: Record) -> int:
        """Count its first token of this attempt; return how many blocks its request grew by."""
        record.num_output += 1
        grown = blocks_for(record.num_tokens + 1) - record.num_blocks
        if grown:
            record.num_blocks += grown
            self.num_blocks_placed += grown
        return grown

    def next_queued(self, now_s: float) -> Record | None:
        """Whose turn it is (policy/batching), of those that wait and are not backing off."""
        heads = [
            head
            for queue in self._tenant_to_queue.values()
            if (head := self._head(queue, now_s)) is not None
        ]
        if len(heads) > 1:
            heads.sort(key=lambda record: record.place)
        return next(in_turns(heads, _who, self.tenant_to_placed), None)

    def _head(self, queue: list[Place], now_s: float) -> Record | None:
        for _, _, request_id in queue:
            record = self.by_id[request_id]
            if record.not_before_s <= now_s:
                return record
        return None

    def _enqueue(self, record: Record) -> None:
        insort(self._tenant_to_queue.setdefault(record.generation.tenant, []), record.place)

    def _dequeue(self, record: Record) -> None:
        queue = self._tenant_to_queue[record.generation.tenant]
        del queue[bisect_left(queue, record.place)]
        if not queue:
            del self._tenant_to_queue[record.generation.tenant]

    def queued(self) -> list[Record]:
        """Those that wait, in the order of their places."""
        return [
            self.by_id[request_id] for _, _, request_id in merge(*self._tenant_to_queue.values())
        ]

    def next_retry_s(self, now_s: float) -> float:
        """When the next back-off ends; infinity if nothing backs off."""
        waiting = chain.from_iterable(self._tenant_to_queue.values())
        times = [self.by_id[request_id].not_before_s for _, _, request_id in waiting]
        return min((time_s for time_s in times if time_s > now_s), default=math.inf)

    def overdue(self, now_s: float) -> list[Record]:
        """Requests past their deadline. All are given as long, so the oldest come first."""
        late = []
        for record in self.by_id.values():
            if record.deadline_s > now_s:
                break
            late.append(record)
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
        """Problems of the book; empty when states, owners, queue and sums agree."""
        problems = self.running.check()
        for record in self.by_id.values():
            self.running.sync(record)
            owns = {
                name
                for name in ("prefill_unit", "decode_unit")
                if getattr(record, name) is not None
            }
            if not OWNS[record.state] <= owns <= MAY_OWN[record.state]:
                problems.append(f"{record.request_id} is {record.state} and owns {sorted(owns)}")
            if record.state in PLACED and record.num_blocks != blocks_for(record.num_tokens + 1):
                problems.append(
                    f"{record.request_id} counts {record.num_blocks} blocks for {record.num_tokens}"
                    " tokens"
                )
        queues: dict[str, list[Place]] = {}
        for record in self.by_id.values():
            if record.state is State.QUEUED:
                queues.setdefault(record.generation.tenant, []).append(record.place)
        if {tenant: sorted(queue) for tenant, queue in queues.items()} != self._tenant_to_queue:
            problems.append("the queue does not hold those that are queued")
        if self.num_blocks_placed != sum(record.num_blocks for record in self.placed()):
            problems.append("the sum of placed blocks is wrong")
        if self.tenant_to_placed != Counter(record.generation.tenant for record in self.placed()):
            problems.append("the counts of tenants' placed requests are wrong")
        counts = Counter(record.state for record in self.by_id.values())
        for state in State:
            if self.counts[state] != counts[state]:
                problems.append(f"the count of {state} requests is wrong")
        return problems


def _who(record: Record) -> tuple[str, int]:
    return record.generation.tenant, record.generation.priority

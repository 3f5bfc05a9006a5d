"""Table of the front's requests: state, owners, all output so far, and the queue.

A state changes only through core/request.py's table. Independent of units and messages.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from itertools import chain

from hadal.core.messages.generation import Generation
from hadal.core.request import OWNS, State, Transition, next_state
from hadal.kv.blocks import blocks_for
from hadal.policy.fairness import INPUT_COST, OUTPUT_COST, ServiceCounters, is_batch, turn_of
from hadal.policy.views import TenantView
from hadal.roles.front.record import QueueKey, Record
from hadal.roles.front.running import Running

PLACED = (State.PREFILLING, State.TRANSFERRING, State.DECODING)
"""States in which a request is assigned to one or two units."""
_OWNED: dict[tuple[bool, bool], frozenset[str]] = {
    (False, False): frozenset(),
    (True, False): frozenset({"prefill_unit"}),
    (False, True): frozenset({"decode_unit"}),
    (True, True): frozenset({"prefill_unit", "decode_unit"}),
}
"""(has a prefill unit, has a decode unit) -> resources that the request owns."""


@dataclass(slots=True)
class Placed:
    """Sums over the placed requests with one KV fingerprint."""

    num_requests: int = 0
    num_blocks: int = 0
    num_transferring: int = 0
    tenant_to_num: Counter[str] = field(default_factory=Counter)


_NONE = Placed()


@dataclass(slots=True)
class FrontRequests:
    """Requests by id, in order of arrival, with the queue and the sums that policies need."""

    by_id: dict[str, Record] = field(default_factory=dict)
    counts: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    fingerprint_to_placed: dict[str, Placed] = field(default_factory=dict)
    """Fingerprint -> sums over its placed requests; no entry if it has none."""
    running: Running = field(default_factory=Running)
    """Requests sent to decode."""
    _tenant_to_queue: dict[str, list[QueueKey]] = field(default_factory=dict)
    """Tenant -> sorted queue keys of its queued requests; no entry if it has none."""
    tenant_to_placed: Counter[str] = field(default_factory=Counter)
    """Tenant -> number of its placed requests, over all fingerprints."""
    counters: ServiceCounters = field(default_factory=ServiceCounters)
    """Service received by each tenant, which orders tenants in the queue (policy/fairness)."""
    tenant_to_open: Counter[str] = field(default_factory=Counter)
    """Tenant -> number of its open requests."""
    _tenant_to_weight: dict[str, float] = field(default_factory=dict)
    """Tenant with open requests -> weight in its latest request."""
    _num_arrived: int = 0
    _deadlines: list[tuple[float, int, str]] = field(default_factory=list)
    """Heap of (time to check a request, its number, its id). The request may have ended by then."""

    @property
    def num_placed(self) -> int:
        return sum(self.counts[state] for state in PLACED)

    @property
    def num_blocks_placed(self) -> int:
        return sum(placed.num_blocks for placed in self.fingerprint_to_placed.values())

    @property
    def num_waiting(self) -> int:
        """Number of queued requests, without batch requests."""
        queues = self._tenant_to_queue.items()
        return sum(len(queue) for tenant, queue in queues if not is_batch(tenant))

    @property
    def num_placed_of_batches(self) -> int:
        """Number of placed batch requests."""
        return sum(num for tenant, num in self.tenant_to_placed.items() if is_batch(tenant))

    def placed_of_batches(self) -> list[Record]:
        """Return placed batch requests, oldest first."""
        if not self.num_placed_of_batches:
            return []
        return [
            record
            for record in self.by_id.values()
            if record.state in PLACED and is_batch(record.generation.tenant)
        ]

    def has_others_placed(self, tenant: str) -> bool:
        """Return whether any other tenant, batch tenants included, has placed requests."""
        return len(self.tenant_to_placed) > (tenant in self.tenant_to_placed)

    def last_of(self, tenant: str, may_go: Callable[[Record], bool]) -> Record | None:
        """Return the last of a tenant's placed requests, in queue order, that `may_go` accepts. The
        tenant's first placed request is never returned, so that it can end.
        """
        placed = sorted(
            (record for record in self.placed() if record.generation.tenant == tenant),
            key=lambda record: record.queue_key,
        )
        return next((record for record in reversed(placed[1:]) if may_go(record)), None)

    def tenant_view(self, tenant: str) -> TenantView:
        """Return the view for policy/fairness of a tenant with open requests."""
        return TenantView(
            tenant,
            self.counters[tenant],
            self._tenant_to_weight[tenant],
            self.tenant_to_placed[tenant],
            tenant in self._tenant_to_queue,
        )

    def num_queued_of(self, tenant: str) -> int:
        """Return the number of a tenant's queued requests."""
        return len(self._tenant_to_queue.get(tenant, ()))

    def num_tenants_with(self, tenant: str) -> int:
        """Return the number of tenants with queued requests, batches excluded and `tenant` included."""
        return len({name for name in self._tenant_to_queue if not is_batch(name)} | {tenant})

    def has_fewer(self, tenant: str, fingerprint: str) -> bool:
        """Return whether another tenant has more requests placed under a fingerprint, relative to
        its weight. False for batches.
        """
        placed, weights = self.placed_under(fingerprint).tenant_to_num, self._tenant_to_weight
        if is_batch(tenant):
            return False
        held = placed[tenant] / weights.get(tenant, 1.0)
        return any(num / weights[other] > held for other, num in placed.items())

    def add(self, generation: Generation, timeout_s: float, *, keeps_text: bool = True) -> Record:
        """Add a new request and queue it by its turn (policy/batching). `keeps_text`: see Front."""
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
        """Apply a transition of core/request.py's table. Raises InvariantError for one that is not
        in it. An ended request is removed.
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
        """Add a request to the sums (`change` 1), or remove it with all its blocks (-1)."""
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
        """Return the sums over placed requests bound to a fingerprint."""
        return self.fingerprint_to_placed.get(fingerprint, _NONE)

    def grow(self, record: Record) -> None:
        """Count the first token of an attempt, and the block that it may need."""
        record.num_output += 1
        self.counters.charge(record.generation.tenant, OUTPUT_COST / record.share_weight)
        grown = blocks_for(record.num_tokens + 1) - record.num_blocks
        if grown:
            record.num_blocks += grown
            self.fingerprint_to_placed[record.fingerprint].num_blocks += grown

    def next_queued(self, now_s: float) -> Record | None:
        """Return the next queued request in turn (policy/fairness); requests that back off are skipped."""
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
        """Charge a prompt's uncached tokens to its tenant at its first placement; retries are free."""
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
        """Return the queued requests in the order of their queue keys."""
        return [
            self.by_id[request_id] for _, _, request_id in merge(*self._tenant_to_queue.values())
        ]

    def next_retry_s(self, now_s: float) -> float:
        """Return the end of the next back-off; infinity if no request backs off."""
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
        """Return requests that the loss of this unit would affect, oldest first."""
        return [
            record
            for record in self.by_id.values()
            if unit in (record.prefill_unit, record.decode_unit)
        ]

    def placed(self) -> Iterator[Record]:
        return (record for record in self.by_id.values() if record.state in PLACED)

    def check(self) -> list[str]:
        """Return problems of the requests; empty if states, owners, queue and sums agree."""
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
            problems.append("the queue differs from the queued requests")
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
    """Return the correct `fingerprint_to_placed` for these placed requests."""
    sums: defaultdict[str, Placed] = defaultdict(Placed)
    for record in records:
        placed = sums[record.fingerprint]
        placed.num_requests += 1
        placed.num_blocks += record.num_blocks
        placed.num_transferring += record.state is State.TRANSFERRING
        placed.tenant_to_num[record.generation.tenant] += 1
    return sums

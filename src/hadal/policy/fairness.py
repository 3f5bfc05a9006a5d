"""Order tenants' turns: scarce capacity is shared by tenants' weights, in cost of work and not in
requests.

Each tenant has a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024): the cost it was served, over its weight. A prompt token costs INPUT_COST, an output
token OUTPUT_COST. The tenant with the smallest counter is next. A tenant that returns with an empty
queue is lifted to the smallest counter of the queued tenants (if none is queued, to that of the
tenant that was queued last), less `burst`, so that idle time saves up no more than a burst. Without
a burst, a tenant below its share would wait behind a flood whenever two of its requests arrive
close together. Bursts do not chain: all returning tenants begin one burst below the same level.

The bound (their theorem 4.4, times weights): while two tenants are both queued, their served costs
over weight differ by at most 2 max(INPUT_COST L, OUTPUT_COST M). L is the longest prompt, M the
most tokens of all requests in work at one time. A tenant that returned with a burst adds `burst`.
Priority above 0 makes a request's own work cheaper, so its tenant gets proportionally more.

Turns alone would make a tenant that arrives at a full fleet wait until requests end. So a turn may
preempt requests (`tenant_to_requeue`).

Batch requests, for which no user waits, belong to a tenant of their own, separate from their owner.
These tenants come after all others, and take turns among themselves.

Within a tenant the order is that of policy/batching.turn_s. Independent of requests and time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol, TypeVar

from hadal.policy.views import TenantView

INPUT_COST = 1.0
OUTPUT_COST = 2.0
"""Costs as in the paper: an output token costs twice an input token (section 5.1, after OpenAI's prices)."""
MAX_COUNTERS = 4096
"""Above this number of counters, those of unqueued tenants that a return would lift are dropped."""

_BATCH = "/batch"
"""Suffix of a batch tenant's name; no other name has a slash."""

S = TypeVar("S")
T = TypeVar("T")


def batch_of(tenant: str) -> str:
    """Return the name under which a tenant's batch requests take turns."""
    return f"{tenant}{_BATCH}"


def is_batch(tenant: str) -> bool:
    """Return True if no user waits for this tenant's requests."""
    return tenant.endswith(_BATCH)


def owner_of(tenant: str) -> str:
    """Return the tenant that has the quota and pays, also for a batch tenant's requests."""
    return tenant.removesuffix(_BATCH)


def share_weight(weight: float, priority: int) -> float:
    """Return the divisor of a request's cost: at priority 4 its tenant may have five times as much."""
    return weight * (1 + max(0, priority))


class ServiceCounters:
    """Served cost of each tenant over its weight. The owner reports which tenants are queued.

    `burst`: how far below the smallest counter of the queued tenants a returning tenant may begin.
    """

    def __init__(self, burst: float = 0.0) -> None:
        self._burst = burst
        self._tenant_to_service: dict[str, float] = {}
        self._last = {False: "", True: ""}
        """Tenant that was queued last, of batches (True) and of others (False)."""
        self._level = {False: 0.0, True: 0.0}
        """Level that a returning tenant is lifted to, less its burst. It never falls."""

    def __getitem__(self, tenant: str) -> float:
        return self._tenant_to_service.get(tenant, 0.0)

    def join(self, tenant: str, waiting: Collection[str]) -> None:
        """Lift the counter of a tenant that begins to queue. `waiting`: tenants queued already."""
        services, kind = self._tenant_to_service, is_batch(tenant)
        of_kind = [other for other in waiting if is_batch(other) is kind]
        least = min((self[other] for other in of_kind), default=self[self._last[kind]])
        self._level[kind] = max(self._level[kind], least)
        least = self._level[kind] - self._burst
        services[tenant] = max(self[tenant], least)
        if len(services) > MAX_COUNTERS:
            self._tenant_to_service = {
                other: service
                for other, service in services.items()
                if service > least or other in waiting or other in (tenant, *self._last.values())
            }

    def leave(self, tenant: str) -> None:
        """Record that a tenant has no queued request left."""
        self._last[is_batch(tenant)] = tenant

    def charge(self, tenant: str, cost: float) -> None:
        """Add a served cost, already divided by the tenant's weight."""
        self._tenant_to_service[tenant] = self[tenant] + cost


class Services(Protocol):
    """Served cost of each tenant over its weight: ServiceCounters, or values of one moment."""

    def __getitem__(self, tenant: str, /) -> float: ...


class Claim(NamedTuple):
    """Tenant and cost of a queued request."""

    tenant: str
    cost: float
    """Cost of serving it, over the tenant's weight."""


def turn_of(tenant: str, service: float, num_held: int, first: S) -> tuple[bool, float, int, S]:
    """Return a sort key for tenants with queued requests: least service first, then fewest requests
    in work (`num_held`), then longest wait (`first`, its earliest queued item). Batches come last.
    """
    return is_batch(tenant), service, num_held, first


def in_turns(
    waiting: Iterable[T],
    claim_of: Callable[[T], Claim],
    services: Services,
    tenant_to_held: Mapping[str, int],
) -> Iterator[T]:
    """Yield queued items in the order to serve them; `waiting` is in each tenant's own order.

    A yielded item counts as served, in this call only. `tenant_to_held`: requests in work, as
    `num_held` of `turn_of`.
    """
    tenant_to_queue: dict[str, deque[tuple[int, T]]] = {}
    for number, one in enumerate(waiting):
        tenant_to_queue.setdefault(claim_of(one).tenant, deque()).append((number, one))
    service = {tenant: services[tenant] for tenant in tenant_to_queue}

    def turn(tenant: str) -> tuple[tuple[bool, float, int, int], str]:
        held, first = tenant_to_held.get(tenant, 0), tenant_to_queue[tenant][0][0]
        return turn_of(tenant, service[tenant], held, first), tenant

    turns = [turn(tenant) for tenant in tenant_to_queue]
    heapify(turns)
    while turns:
        _, tenant = heappop(turns)
        queue = tenant_to_queue[tenant]
        one = queue.popleft()[1]
        service[tenant] += claim_of(one).cost
        yield one
        if queue:
            heappush(turns, turn(tenant))


def tenant_to_requeue(
    asking: TenantView, others: Sequence[TenantView], cost: float, ends_per_step: float
) -> str | None:
    """Return the tenant that must give up a placed request for the next one in turn that finds no
    capacity; None: the request waits until another ends.

    `cost`: of serving one request of `asking`, prompt and output, over its weight. `ends_per_step`:
    requests that end per decode step; from 1 on, capacity is free about as soon without preemption.

    The result is the tenant with most service among those with several placed requests and no less
    service than `asking` after this turn, if one of two conditions holds. Either it has requests
    queued and no less service than `asking` once all its placed requests and this one are served.
    Or, after giving up one request, it still has more placed requests over its weight than `asking`
    then has. So the next turn does not reverse the preemption, and a tenant below its share loses
    nothing to one above. The tenant gives up the last of its requests in its own order and keeps
    the first, which therefore finishes.
    """
    if ends_per_step >= 1.0:
        return None
    held = (asking.num_placed + 1) / asking.weight
    giving = [
        other
        for other in others
        if other.num_placed > 1
        and other.service >= asking.service + cost
        and (
            (other.is_waiting and other.service >= asking.service + cost * (asking.num_placed + 1))
            or (other.num_placed - 1) / other.weight > held
        )
    ]
    return max(giving, key=lambda other: (other.service, other.tenant)).tenant if giving else None

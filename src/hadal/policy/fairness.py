"""Whose turn it is: what is scarce is shared among tenants by their weights, in cost of work and not
in requests.

A virtual token counter for each tenant (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024): what it was served, INPUT_COST for a token of a prompt and OUTPUT_COST for one drawn,
over its weight. Next is the tenant with the smallest counter. One that comes back with nothing
waiting is lifted to the smallest counter of those that wait, less `burst`, so that nobody saves up
more; where nobody waits, to that of whoever waited last. Without a burst, whoever asks for less than
its share waits behind a flood as soon as two of its requests come close together. Who is there
thanks to a burst lowers nobody: however many come, all begin one burst below, and none below those.

The bound (their theorem 4.4, times weights): while two tenants wait all the time, what each was
served over its weight differs by 2 max(INPUT_COST L, OUTPUT_COST M) at most, L being the longest
prompt and M all tokens that the requests which are worked on at one time can come to; by `burst`
more if one of them came back with it. Priority
above 0 makes a request's own work cheaper, so its tenant has as many times more.

Turns alone would leave a tenant that comes to a full fleet waiting until requests end. So a turn may
take room back (`choose_to_give_way`).

Requests of batches, for which nobody waits, are those of a tenant of its own beside their owner's:
all of them come after all others, and take turns among themselves.

Within a tenant the order is that of policy/batching.turn_s. Knows no requests and no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol, TypeVar

from hadal.policy.views import TenantView

INPUT_COST = 1.0
OUTPUT_COST = 2.0
"""The paper's: a token drawn costs twice one that is read (its section 5.1, after OpenAI's prices)."""
MAX_COUNTERS = 4096
"""Beyond so many, those of tenants that wait for nothing and would be lifted anyway are dropped."""

_BATCH = "/batch"
"""What the name of such a tenant ends in; no other has a slash."""

S = TypeVar("S")
T = TypeVar("T")


def batch_of(tenant: str) -> str:
    """The name under which requests of a tenant's batches take turns."""
    return f"{tenant}{_BATCH}"


def is_batch(tenant: str) -> bool:
    """Whether nobody waits for its requests."""
    return tenant.endswith(_BATCH)


def owner_of(tenant: str) -> str:
    """Whose quota and money it is."""
    return tenant.removesuffix(_BATCH)


def share_weight(weight: float, priority: int) -> float:
    """What a request's work is divided by: at priority 4 its tenant may have five times as much."""
    return weight * (1 + max(0, priority))


class ServiceCounters:
    """What each tenant was served, over its weight. Its owner says who waits.

    `burst`: how much less than the least of those that wait one that comes back may count as served.
    """

    def __init__(self, burst: float = 0.0) -> None:
        self._burst = burst
        self._tenant_to_service: dict[str, float] = {}
        self._last = {False: "", True: ""}
        """Whoever was the last to wait for nothing any more, of batches apart."""
        self._level = {False: 0.0, True: 0.0}
        """What one that comes back is lifted to, before its burst. It never falls."""

    def __getitem__(self, tenant: str) -> float:
        return self._tenant_to_service.get(tenant, 0.0)

    def join(self, tenant: str, waiting: Collection[str]) -> None:
        """A tenant that waits for nothing begins to; `waiting` are those that do already."""
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
        """Nothing of a tenant waits any more."""
        self._last[is_batch(tenant)] = tenant

    def charge(self, tenant: str, cost: float) -> None:
        """A tenant was served so much, over its weight."""
        self._tenant_to_service[tenant] = self[tenant] + cost


class Services(Protocol):
    """What each tenant was served, over its weight: ServiceCounters, or values of one moment."""

    def __getitem__(self, tenant: str, /) -> float: ...


class Claim(NamedTuple):
    """What one that waits asks for."""

    tenant: str
    cost: float
    """Of serving it, over its weight."""


def turn_of(tenant: str, service: float, num_held: int, first: S) -> tuple[bool, float, int, S]:
    """A tenant's place among those of whom something waits, as a key to sort by: whoever had less
    service is first, then whoever holds less, then whoever waits longest (`first`, of what it has
    that waits). Batches are behind all others.
    """
    return is_batch(tenant), service, num_held, first


def in_turns(
    waiting: Iterable[T],
    claim_of: Callable[[T], Claim],
    services: Services,
    tenant_to_held: Mapping[str, int],
) -> Iterator[T]:
    """Yield those that wait in the order in which they are to be served; `waiting` is in the order
    that a tenant's own keep.

    What is yielded counts as served, here only. `tenant_to_held`: as `turn_of` has it.
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


def choose_to_give_way(
    asking: TenantView, others: Sequence[TenantView], cost: float, ends_per_step: float
) -> str | None:
    """Return the tenant that has to give room back for a request whose turn it is and that finds
    none; None: it waits until something ends.

    `cost`: of a request like it from its prompt to its last token, over its weight. `ends_per_step`:
    requests that end in a decode step; where it is 1, there is room about as soon without.

    It is the tenant that was served most, if `asking` stays behind it when its turn is done, and if
    it has either more waiting still, and would have been served more even when all that `asking`
    has is done, or keeps more than `asking` has then, over their weights. So what is taken is not
    taken back by the next turn, and whoever asks for less than its share loses nothing to one that
    asks for more. It gives the last of its requests in its own order, and keeps the first, which
    therefore ends.
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

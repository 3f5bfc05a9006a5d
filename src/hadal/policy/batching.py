"""The order of those that wait, and chunks of them packed into one step of a prefill rank under a
token budget.

Tenants take turns: next is always somebody of the tenant of whom least is being worked on, so what
one tenant sends at once is in nobody's way but its own. Within a tenant the order is that of
arrival, and priority is worth a bounded time of waiting, so whoever waits longer than that by more
than another is ahead of it whatever the priority: nobody starves.

Sarathi's chunked prefill (arXiv 2308.16369): a step never computes more than `chunk_tokens`, so a
long prompt costs the others one bounded step at a time. Nobody is overtaken: a prompt whose blocks
are not free stops everybody behind it, so the largest prompt waits no longer than for those before
it. A unit of several ranks cuts its steps by cost instead (policy/prefill_balance); a rank alone
keeps nobody waiting, and the token budget fills its step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from hadal.policy.views import PromptView

T = TypeVar("T")

AGE_S = 5.0
"""Seconds of waiting that a level of priority is worth: about a mean time to first token at a unit
three quarters full (bench/balance_prefill), so that a level shows there and eight of them keep
nobody waiting for a minute.
"""


def turn_s(arrived_s: float, priority: int) -> float:
    """Return the place among those that wait, the smallest first; the caller breaks ties by
    sequence.
    """
    return arrived_s - AGE_S * priority


def in_turns(
    waiting: Iterable[T], who: Callable[[T], tuple[str, int]], tenant_to_held: Mapping[str, int]
) -> Iterator[T]:
    """Yield those that wait so that tenants take turns; `waiting` is in the order of turn_s, which
    a tenant's own keep.

    `who`: tenant and priority of one that waits. `tenant_to_held`: of how many more of each the
    work has begun; what is yielded counts as well. A priority above 0 weighs a tenant's head: at 4
    its tenant may hold five times as many.
    """
    tenant_to_queue: dict[str, deque[tuple[int, T]]] = {}
    for number, one in enumerate(waiting):
        tenant_to_queue.setdefault(who(one)[0], deque()).append((number, one))
    held = {tenant: tenant_to_held.get(tenant, 0) for tenant in tenant_to_queue}

    def turn(tenant: str) -> tuple[float, int, str]:
        number, head = tenant_to_queue[tenant][0]
        return held[tenant] / (1 + max(0, who(head)[1])), number, tenant

    turns = [turn(tenant) for tenant in tenant_to_queue]
    heapify(turns)
    while turns:
        _, _, tenant = heappop(turns)
        queue = tenant_to_queue[tenant]
        yield queue.popleft()[1]
        held[tenant] += 1
        if queue:
            heappush(turns, turn(tenant))


def pack_chunks(
    prompts: Sequence[PromptView], chunk_tokens: int, num_blocks_free: int, num_starts_max: int
) -> list[int]:
    """Return how many tokens of prompts[0], prompts[1], ... to compute now; it ends where packing
    stopped.

    `prompts` come in the order of arrival, those that have started first. `num_starts_max` limits
    how many may start.
    """
    budget, blocks, starts = chunk_tokens, num_blocks_free, num_starts_max
    sizes: list[int] = []
    for prompt in prompts:
        if budget == 0 or prompt.num_blocks_needed > blocks:
            break
        if prompt.num_blocks_needed:
            if starts == 0:
                break
            starts -= 1
            blocks -= prompt.num_blocks_needed
        size = min(prompt.num_tokens, budget)
        budget -= size
        sizes.append(size)
    return sizes

"""Choose the requests that a decode unit preempts when a running one needs a block and none is free.

The latest arrival of the tenant with most blocks goes first: it has the least computed work, and no
tenant pays for the growth of a tenant with more. The oldest request (of users, if there is one)
always proceeds, so that at least one finishes. No output is lost: the front has all tokens of the
preempted requests and prefills them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hadal.policy.fairness import is_batch
from hadal.policy.views import HolderView


def choose_victims(holders: Sequence[HolderView], num_blocks_missing: int) -> list[int]:
    """Return slots to preempt until `num_blocks_missing` blocks are free: repeatedly the latest
    arrival of the tenant that still holds most blocks, batches before all others.

    The oldest request that is of no batch, if any, is never among them, even if blocks are missing.
    """
    tenant_to_num: Counter[str] = Counter()
    tenant_to_holders: dict[str, list[HolderView]] = {}
    in_order = sorted(holders, key=lambda holder: (is_batch(holder.tenant), holder.arrival))
    for number, holder in enumerate(in_order):
        tenant_to_num[holder.tenant] += holder.num_blocks
        if number:
            tenant_to_holders.setdefault(holder.tenant, []).append(holder)
    victims: list[int] = []
    missing = num_blocks_missing
    while missing > 0 and tenant_to_holders:
        # Ties: the tenant with the latest arrival.
        tenant = max(
            tenant_to_holders,
            key=lambda name: (
                is_batch(name),
                tenant_to_num[name],
                tenant_to_holders[name][-1].arrival,
            ),
        )
        victim = tenant_to_holders[tenant].pop()
        if not tenant_to_holders[tenant]:
            del tenant_to_holders[tenant]
        tenant_to_num[tenant] -= victim.num_blocks
        victims.append(victim.slot)
        missing -= victim.num_blocks
    return victims

"""The requests that leave a decode unit when a running one needs a block and none is free.

The latest arrived of the tenant that holds most goes first: it has the least computed work behind
it, and what one tenant's requests grow by is taken from none that holds less. The oldest of all
always proceeds, so that something finishes. Nothing is lost: the front holds all tokens of the
others and prefills them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hadal.policy.fairness import is_batch
from hadal.policy.views import HolderView


def choose_victims(holders: Sequence[HolderView], num_blocks_missing: int) -> list[int]:
    """Return slots to preempt, in turn the latest arrived of whichever tenant still holds most
    blocks, until `num_blocks_missing` blocks come free; those of batches before all others.

    Never all of them: the oldest stays, even if that leaves blocks missing.
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
        # Of equals the one whose request came last.
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

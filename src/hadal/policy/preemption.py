"""Who has to leave a decode unit when a running request needs a block and none is free.

The latest arrived goes first: it has the least computed work behind it, and the oldest always proceeds, so that
something finishes. Nothing is lost: the front holds all its tokens and prefills them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.policy.views import HolderView


def choose_victims(holders: Sequence[HolderView], num_blocks_missing: int) -> list[int]:
    """Return slots to preempt, the latest arrived first, until `num_blocks_missing` blocks come free.

    Never all of them: the oldest stays, even if that leaves blocks missing.
    """
    victims: list[int] = []
    missing = num_blocks_missing
    for holder in sorted(holders, key=lambda holder: -holder.arrival)[: max(len(holders) - 1, 0)]:
        if missing <= 0:
            break
        victims.append(holder.slot)
        missing -= holder.num_blocks
    return victims

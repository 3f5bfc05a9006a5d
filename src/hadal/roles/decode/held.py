"""KV that a decode unit's ranks hold from an earlier leader, until the front resumes it.

    RankReset lists the KV --> UnitUp names its attempts to the front --> Resume names some of them:
    these continue after their last delivered token, and all other KV is freed

KV that is not resumed within HELD_S seconds is freed. Independent of slots.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from hadal.core.messages.generation import Generation, Key
from hadal.core.plans import Held, HeldKv
from hadal.kv.blocks import blocks_for
from hadal.roles.ranks.pools import RankPools, held_by

HELD_S = 10.0


class DecodeHeld:
    """Owner of the blocks held from an earlier leader."""

    def __init__(self, pools: RankPools) -> None:
        self._pools = pools
        self._by_rank: dict[int, dict[int, HeldKv]] = {}
        """Rank -> attempt id -> its KV on that rank. A moving attempt may lie on two ranks."""
        self._until_s = math.inf

    @property
    def attempt_ids(self) -> tuple[int, ...]:
        return tuple(
            sorted({attempt_id for of_rank in self._by_rank.values() for attempt_id in of_rank})
        )

    def take(self, now_s: float, rank_to_held: Mapping[int, Held]) -> None:
        """Hold the KV of ranks that were taken over. In their pools `held_by` owns it already."""
        for rank, held in rank_to_held.items():
            self._by_rank[rank] = {kv.attempt_id: kv for kv in held.kv}
            self._until_s = now_s + HELD_S

    def lose(self, rank: int) -> None:
        """Free the KV of a lost rank."""
        for kv in self._by_rank.pop(rank, {}).values():
            self._free(rank, kv)

    def release(self) -> None:
        """Free all KV that is left: no attempt resumes it."""
        for rank in list(self._by_rank):
            self.lose(rank)
        self._until_s = math.inf

    def expire(self, now_s: float) -> None:
        if now_s >= self._until_s:
            self.release()

    def claim(self, generation: Generation) -> tuple[int, HeldKv] | None:
        """Make the attempt the owner of its KV and return (rank, KV). None if no rank holds all
        positions that the attempt's next step reads.
        """
        num_tokens = len(generation.prompt) + len(generation.output) - 1
        for rank, of_rank in self._by_rank.items():
            kv = of_rank.get(generation.attempt_id)
            if (
                kv is None
                or kv.num_tokens < num_tokens
                or len(kv.block_ids) < blocks_for(num_tokens)
            ):
                continue
            del of_rank[generation.attempt_id]
            key: Key = (generation.request_id, generation.attempt)
            # The attempt acquires the blocks before they are freed here. A block without an owner
            # is free, and its rank would be sent a message to forget it.
            self._pools[rank].acquire(kv.block_ids, key)
            self._free(rank, kv)
            return rank, kv
        return None

    def owners(self, rank: int) -> Iterator[tuple[Hashable, Sequence[int]]]:
        """Return (owner, block ids) of a rank's held KV, as the rank's pool records them."""
        return ((held_by(rank, kv), kv.block_ids) for kv in self._by_rank.get(rank, {}).values())

    def _free(self, rank: int, kv: HeldKv) -> None:
        self._pools.free(rank, kv.block_ids, held_by(rank, kv))

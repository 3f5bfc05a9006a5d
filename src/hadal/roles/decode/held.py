"""KV that a decode unit's ranks hold since another leader led them, until the front claims it.

    RankReset: held --> UnitUp names the attempts ... Resume: some go on from the last token
    delivered, the rest is freed

A front that sends nothing for HELD_S claims nothing. Knows no slots.
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
    """Owns the blocks of what is held."""

    def __init__(self, pools: RankPools) -> None:
        self._pools = pools
        self._by_rank: dict[int, dict[int, HeldKv]] = {}
        """rank -> attempt id -> its KV there. One that was moving may lie on two ranks."""
        self._until_s = math.inf

    @property
    def attempt_ids(self) -> tuple[int, ...]:
        return tuple(
            sorted({attempt_id for of_rank in self._by_rank.values() for attempt_id in of_rank})
        )

    def take(self, now_s: float, rank_to_held: Mapping[int, Held]) -> None:
        """These ranks were taken over; the pools own their KV for it already."""
        for rank, held in rank_to_held.items():
            self._by_rank[rank] = {kv.attempt_id: kv for kv in held.kv}
            self._until_s = now_s + HELD_S

    def lose(self, rank: int) -> None:
        """The rank is gone."""
        for kv in self._by_rank.pop(rank, {}).values():
            self._free(rank, kv)

    def release(self) -> None:
        """Nobody goes on with what is left."""
        for rank in list(self._by_rank):
            self.lose(rank)
        self._until_s = math.inf

    def expire(self, now_s: float) -> None:
        if now_s >= self._until_s:
            self.release()

    def claim(self, generation: Generation) -> tuple[int, HeldKv] | None:
        """Hand over an attempt's KV, if all of it that its next step reads is there: (rank, KV),
        its blocks now the attempt's own.
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
            # Owned by the attempt before they are let go of here: a block that is nobody's is free,
            # and ranks are told to forget it.
            self._pools[rank].acquire(kv.block_ids, key)
            self._free(rank, kv)
            return rank, kv
        return None

    def owners(self, rank: int) -> Iterator[tuple[Hashable, Sequence[int]]]:
        """Who owns which of a rank's blocks, as the pools know it."""
        return ((held_by(rank, kv), kv.block_ids) for kv in self._by_rank.get(rank, {}).values())

    def _free(self, rank: int, kv: HeldKv) -> None:
        self._pools.free(rank, kv.block_ids, held_by(rank, kv))

"""The KV blocks of a unit's ranks: one allocator each, who lives, and what was freed since the host heard of it.

Knows no requests: whoever holds blocks of a lost rank forgets them before the rank's allocator is replaced.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hadal.core.seams import Freed, RankReset
from hadal.kv.blocks import BlockAllocator


class RankPools:
    """Ranks of a unit of several are dead until a RankReset names them fresh; a rank alone is alive from the start."""

    def __init__(self, num_blocks: int, num_ranks: int = 1, name: str = "") -> None:
        """`num_blocks`: of each rank, the scratch block included; `name`: of the pool of a rank alone."""
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; a unit has at least one.")
        self.num_ranks = num_ranks
        self.generation = 0
        self.is_living = [num_ranks == 1] * num_ranks
        self.names = [name if num_ranks == 1 else ""] * num_ranks
        """By rank: under this name others find the pool's memory. New at every start of the rank."""
        self._num_blocks = num_blocks
        self._allocators = [BlockAllocator(num_blocks) for _ in range(num_ranks)]
        self._freed: list[list[int]] = [[] for _ in range(num_ranks)]

    def __getitem__(self, rank: int) -> BlockAllocator:
        return self._allocators[rank]

    @property
    def living(self) -> list[int]:
        return [rank for rank, is_living in enumerate(self.is_living) if is_living]

    @property
    def num_living(self) -> int:
        return sum(self.is_living)

    @property
    def num_blocks_rank(self) -> int:
        """Usable blocks of a rank, living or not: what a request can hold at most."""
        return self._num_blocks - 1

    @property
    def num_blocks_request(self) -> int:
        """Usable blocks of the largest living rank; 0 if none lives."""
        return self.num_blocks_rank if any(self.is_living) else 0

    @property
    def num_usable(self) -> int:
        """Of the living ranks together."""
        return self.num_blocks_rank * self.num_living

    @property
    def num_used(self) -> int:
        return sum(allocator.num_used for allocator in self._allocators)

    @property
    def num_free(self) -> int:
        return self.num_usable - self.num_used

    def free(self, rank: int, block_ids: Sequence[int], owner: Hashable) -> None:
        """Give blocks back; the next `take_freed` says so."""
        self._allocators[rank].free(block_ids, owner)
        self._freed[rank] += block_ids

    def take_freed(self) -> list[Freed]:
        """What was freed since the last call: to be told before a plan or a pull that may write these blocks."""
        effects = []
        for rank, block_ids in enumerate(self._freed):
            if block_ids:
                effects.append(Freed(tuple(block_ids), rank))
                self._freed[rank] = []
        return effects

    def lost(self, event: RankReset) -> list[int]:
        """Ranks whose KV is gone with this reset: a living one that joins anew was lost without a word."""
        return sorted({*event.lost, *(rank for rank in event.fresh if self.is_living[rank])})

    def reset(self, event: RankReset) -> None:
        """Take in who lives from now on. Ranks lost or fresh begin with empty pools."""
        self.generation = event.generation
        for rank in {*event.lost, *event.fresh}:
            self.is_living[rank] = rank in event.fresh
            self._allocators[rank] = BlockAllocator(self._num_blocks)
            self._freed[rank] = []
        for rank, name in enumerate(event.pools):
            self.names[rank] = name

    def check(self) -> list[str]:
        """Problems; empty when every ledger adds up and a dead rank holds nothing."""
        problems = []
        for rank, allocator in enumerate(self._allocators):
            problems += [f"rank {rank}: {problem}" for problem in allocator.check()]
            if not self.is_living[rank] and allocator.num_used:
                problems.append(f"rank {rank} is dead and holds {allocator.num_used} blocks")
        return problems

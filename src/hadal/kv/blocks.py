"""The blocks of one rank's KV pool: which are free, who owns the others, and how often each was freed.

Knows nothing of what is in a block. Block 0 is scratch: padded rows of a batch write there, so it is never handed out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hadal.core.errors import InvariantError
from hadal.core.messages import BLOCK_TOKENS, SCRATCH_BLOCK

Counts = TypeVar("Counts", int, NDArray[np.int64])


def blocks_for(num_tokens: Counts) -> Counts:
    """Blocks that hold `num_tokens` tokens of KV; of an array, one by one."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockAllocator:
    """Hands out blocks 1 .. num_blocks-1, the most recently freed first (it is the likeliest to be in a cache)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed, as block 0 is scratch.")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._owner: list[Hashable | None] = [None] * num_blocks
        self._generation = [0] * num_blocks

    @property
    def num_usable(self) -> int:
        """Blocks that can be owned: all but the scratch block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def allocate(self, count: int, owner: Hashable) -> tuple[int, ...] | None:
        """Take `count` blocks for `owner`, or None if there are not as many: never some of them."""
        if count < 0 or owner is None:
            raise ValueError(f"cannot allocate {count} blocks for {owner!r}.")
        if count > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(count))
        for block in blocks:
            self._owner[block] = owner
        return blocks

    def free(self, blocks: Sequence[int], owner: Hashable) -> None:
        """Give blocks back and raise their generations. Raises InvariantError unless `owner` owns every one of them."""
        for block in blocks:
            if not SCRATCH_BLOCK < block < self.num_blocks or self._owner[block] != owner:
                raise InvariantError(f"{owner!r} frees block {block}, which it does not own.")
            self._owner[block] = None
            self._generation[block] += 1
            self._free.append(block)

    def generations(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """How often each block was freed so far: a lease names these, a changed one voids the copy."""
        return tuple(self._generation[block] for block in blocks)

    def owners(self) -> dict[int, Hashable]:
        """Every owned block and its owner."""
        return {block: owner for block, owner in enumerate(self._owner) if owner is not None}

    def check(self) -> list[str]:
        """Problems of the ledger; empty when free and owned blocks are apart and together all there are."""
        problems = []
        if len(set(self._free)) != len(self._free):
            problems.append("a block is in the free list twice")
        if SCRATCH_BLOCK in self._free or self._owner[SCRATCH_BLOCK] is not None:
            problems.append("the scratch block was handed out")
        owned = self.owners()
        both = owned.keys() & set(self._free)
        if both:
            problems.append(f"blocks {sorted(both)} are free and owned")
        if len(owned) + len(self._free) != self.num_usable:
            problems.append(f"{len(owned)} owned and {len(self._free)} free blocks are not {self.num_usable}")
        return problems

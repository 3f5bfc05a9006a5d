"""Choose the cached prefix of a prompt: the blocks in the rank's pool, then the disk's blocks if
reading them is cheaper than computing them.

Blocks in the pool cost nothing. A read costs a fixed time, and a time per block. The time to
compute blocks grows faster, since each attends to all before it, so either all of the disk's blocks
are read or none. Reads queued earlier add their time. While nothing was measured, reading is
assumed cheaper, so that it gets measured.

The last position of a prompt is always computed, because the next token is drawn from it.
Independent of block names and places.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.rates import StepRates


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Measured cost of reading blocks from disk."""

    load_s: float
    """Fixed seconds of one read of any size."""
    block_s: float

    def seconds(self, num_blocks: int) -> float:
        return self.load_s + num_blocks * self.block_s


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached beginning of a prompt on a rank, in blocks."""

    num_memory: int = 0
    """Blocks found in the rank's pool."""
    num_shared: int = 0
    """Blocks of `num_memory` that are in use already, so that they need no free blocks."""
    num_loading: int = 0
    """Blocks after `num_memory` that will be read from disk."""
    load_s: float = 0.0
    """Predicted seconds until `num_loading` blocks are read; 0 if a rate is unknown."""
    num_recomputed: int = 0
    """Blocks after `num_memory` that are on disk, but cheaper to compute."""

    @property
    def num_blocks(self) -> int:
        return self.num_memory + self.num_loading


NOTHING = Prefix()


def usable_blocks(num_tokens: int) -> int:
    """Return how many blocks of a prompt of `num_tokens` may come out of a cache."""
    return max(0, num_tokens - 1) // BLOCK_TOKENS


def choose_prefix(
    num_memory: int,
    num_shared: int,
    num_disk: int,
    rates: StepRates | None,
    loads: ReadRates | None,
    queued_s: float = 0.0,
) -> Prefix:
    """Choose between reading and computing the `num_disk` blocks on disk after the first `num_memory`.

    `rates`, `loads`: None while nothing was measured. `queued_s`: seconds of the reads already under
    way to this rank.
    """
    if not num_disk:
        return Prefix(num_memory, num_shared)
    load_s = queued_s + loads.seconds(num_disk) if loads is not None else 0.0
    num_tokens = num_disk * BLOCK_TOKENS
    if rates is not None and loads is not None:
        compute_s = rates.whole_s(num_memory * BLOCK_TOKENS, num_tokens)
        if compute_s < load_s:
            return Prefix(num_memory, num_shared, num_recomputed=num_disk)
    return Prefix(num_memory, num_shared, num_disk, load_s if rates is not None else 0.0)

"""Which prefix of a prompt to take from where: what the rank's pool has, and what the disk has behind
that, by price.

What is in the pool costs nothing. Reading takes a time of its own and grows with the blocks,
computing them grows faster (each attends to all before it): so it is all of them or none, never
some. A read that waits behind others is as much dearer. While nothing was measured, reading is
taken for cheaper: that is how it comes to be measured.

The last position of a prompt is always computed, for the next token is drawn from it. Knows no
names and no places.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.rates import StepRates


@dataclass(frozen=True, slots=True)
class ReadRates:
    """What reading blocks from disk takes, as measured."""

    load_s: float
    """Seconds that one read from disk takes, whatever its size."""
    block_s: float

    def seconds(self, num_blocks: int) -> float:
        return self.load_s + num_blocks * self.block_s


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a prompt begins with on a rank, in blocks."""

    num_memory: int = 0
    """Found in the rank's pool."""
    num_shared: int = 0
    """Those of them that are in use already, so that they need no room."""
    num_loading: int = 0
    """Blocks behind those that are to be read from disk."""
    load_s: float = 0.0
    """What that is predicted to take; 0 while unmeasured."""
    num_recomputed: int = 0
    """Blocks behind those that are on disk and cheaper to compute."""

    @property
    def num_blocks(self) -> int:
        return self.num_memory + self.num_loading


NOTHING = Prefix()


def usable_blocks(num_tokens: int) -> int:
    """Blocks of a prompt of `num_tokens` that may come out of a cache."""
    return max(0, num_tokens - 1) // BLOCK_TOKENS


def choose_prefix(
    num_memory: int,
    num_shared: int,
    num_disk: int,
    rates: StepRates | None,
    loads: ReadRates | None,
    queued_s: float = 0.0,
) -> Prefix:
    """Decide about the `num_disk` blocks that the disk has behind the first `num_memory`.

    `rates`, `loads`: None while nothing was measured. `queued_s`: of the reads that are under way
    to this rank.
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

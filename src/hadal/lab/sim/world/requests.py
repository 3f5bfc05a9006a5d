"""What users ask of a simulated world, and how their blocks are named: by request and place, as
there is no text.

    name of block i of request n = n and i in 8 bytes, n in 8 more

The names of live serving are hashes of text (kv/names); nothing in the roles looks into one. So a
disk can be asked for a block of a request (lab/sim/world/disk) without a table of all blocks there
are: the published fleet's has billions.

Knows neither roles nor clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats, Ints
from hadal.core.cache import NAME_BYTES
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.core.plans import Sampling
from hadal.lab.sim.runners import STOP_ID

FINGERPRINT = "simulated"
"""Of all KV (kv/names): of the disk cache's folder, and in the names of what decode writes there."""
_INDEX_BITS = 24
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Requests:
    """What users ask for, in the order of arrival."""

    arrival_s: Floats
    tokens_in: Ints
    tokens_out: Ints
    """Length at which the model draws its stop id."""
    tokens_cached: Ints = field(default_factory=lambda: _NONE)
    """First tokens of the prompt that are on disk when it comes: full blocks. Left out: none of
    any. Those that run at the start have all of theirs there.
    """
    tokens_done: Ints = field(default_factory=lambda: _NONE)
    """Output tokens made before the start: more than 0 for those that run then. Left out: none
    does.
    """

    def __post_init__(self) -> None:
        for name in ("tokens_cached", "tokens_done"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.zeros(len(self.arrival_s), np.int64))
        lengths = (self.tokens_in, self.tokens_out, self.tokens_cached, self.tokens_done)
        if any(len(self.arrival_s) != len(column) for column in lengths):
            raise ValueError("requests need as many arrivals as lengths.")
        if (np.diff(self.arrival_s) < 0).any() or (
            np.concatenate([self.tokens_in, self.tokens_out]) < 1
        ).any():
            raise ValueError(
                "requests must come in the order of arrival, with at least one token in and out."
            )
        cached = self.tokens_cached
        if ((cached % BLOCK_TOKENS != 0) | (cached < 0) | (cached > self.tokens_in)).any():
            raise ValueError("tokens_cached must be full blocks of the prompt.")
        if ((self.tokens_done < 0) | (self.tokens_done >= self.tokens_out)).any():
            raise ValueError("tokens_done must leave at least one token to make.")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def is_running(self) -> NDArray[np.bool_]:
        """Whether each request runs at the start."""
        return self.tokens_done > 0

    @property
    def blocks_cached(self) -> Ints:
        """Each request's blocks that are on disk at the start; all full ones of a request that runs
        then.
        """
        full = (self.tokens_in + self.tokens_done) // BLOCK_TOKENS
        return np.where(self.is_running, full, self.tokens_cached // BLOCK_TOKENS)

    def output_tokens(self, number: int) -> int:
        """Return the length at which a request's output ends."""
        return int(self.tokens_out[number])

    def generation(self, number: int, max_context: int, num_named: int) -> Generation:
        """A request as the front takes it. `num_named`: blocks of its text that have a name."""
        num_in, num_done = int(self.tokens_in[number]), int(self.tokens_done[number])
        prompt, output = (cast("tuple[int, ...]", range(size)) for size in (num_in, num_done))
        return Generation(
            str(number),
            prompt,
            output,
            max(max_context - num_in, 1),
            (STOP_ID,),
            0,
            Sampling(seed=number),
            0,
            chain=chain_of(number, num_named),
            fingerprint=FINGERPRINT,
        )


def chain_of(number: int, num_blocks: int) -> bytes:
    """Names of a request's first blocks. The front's summary keeps 8 bytes of each: they differ,
    too.
    """
    if not num_blocks:
        return b""
    names = np.empty((num_blocks, 2), np.int64)
    names[:, 0] = (number << _INDEX_BITS) + np.arange(num_blocks)
    names[:, 1] = number
    return names.tobytes()


def block_of(name: bytes) -> tuple[int, int] | None:
    """(request, which of its blocks) that a name is of; None if it is another's, as a hash of text
    is.
    """
    first = int.from_bytes(name[:8], "little")
    number = first >> _INDEX_BITS
    if len(name) != NAME_BYTES or number != int.from_bytes(name[8:], "little"):
        return None
    return number, first & ((1 << _INDEX_BITS) - 1)

"""Requests of a simulated world, and the names of their KV blocks, made of request and index
because there is no text.

    name of block i of request n = n and i in 8 bytes, n in 8 more

In live serving a name is a hash of text (kv/names), and no role interprets it. Here the disk
(lab/sim/world/disk) decodes a name instead of looking it up in a table of all blocks: the published
fleet has billions.

Does not depend on roles or clocks.
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
"""KV fingerprint (kv/names): folder of the disk cache, and part of the names that decode writes."""
_INDEX_BITS = 24
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Requests:
    """Requests of all users in the order of arrival, arrays [N]. Raises ValueError if not valid."""

    arrival_s: Floats
    tokens_in: Ints
    tokens_out: Ints
    """Output length, in tokens, at which the model draws its stop id."""
    tokens_cached: Ints = field(default_factory=lambda: _NONE)
    """Leading prompt tokens on disk at arrival, in full blocks. Empty: 0 for all. Requests that run
    at the start have all their full blocks on disk.
    """
    tokens_done: Ints = field(default_factory=lambda: _NONE)
    """Output tokens generated before the start; above 0 if the request runs then. Empty: all 0."""

    def __post_init__(self) -> None:
        for name in ("tokens_cached", "tokens_done"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.zeros(len(self.arrival_s), np.int64))
        lengths = (self.tokens_in, self.tokens_out, self.tokens_cached, self.tokens_done)
        if any(len(self.arrival_s) != len(column) for column in lengths):
            raise ValueError("requests need equal numbers of arrivals and lengths.")
        if (np.diff(self.arrival_s) < 0).any() or (
            np.concatenate([self.tokens_in, self.tokens_out]) < 1
        ).any():
            raise ValueError(
                "requests must be sorted by arrival and have at least one token in and out."
            )
        cached = self.tokens_cached
        if ((cached % BLOCK_TOKENS != 0) | (cached < 0) | (cached > self.tokens_in)).any():
            raise ValueError("tokens_cached must be full blocks of the prompt.")
        if ((self.tokens_done < 0) | (self.tokens_done >= self.tokens_out)).any():
            raise ValueError("tokens_done must leave at least one token to generate.")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def is_running(self) -> NDArray[np.bool_]:
        """True for each request that runs at the start."""
        return self.tokens_done > 0

    @property
    def blocks_cached(self) -> Ints:
        """Leading blocks of each request on disk at the start; all full ones if it runs then."""
        full = (self.tokens_in + self.tokens_done) // BLOCK_TOKENS
        return np.where(self.is_running, full, self.tokens_cached // BLOCK_TOKENS)

    def output_tokens(self, number: int) -> int:
        """Return the length at which a request's output ends."""
        return int(self.tokens_out[number])

    def generation(self, number: int, max_context: int, num_named: int) -> Generation:
        """Return a request as sent to the front. `num_named`: leading blocks that get a name."""
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
    """Return the names of a request's first blocks. The first 8 bytes of a name are unique among
    all blocks, because the front's summary keeps only these.
    """
    if not num_blocks:
        return b""
    names = np.empty((num_blocks, 2), np.int64)
    names[:, 0] = (number << _INDEX_BITS) + np.arange(num_blocks)
    names[:, 1] = number
    return names.tobytes()


def block_of(name: bytes) -> tuple[int, int] | None:
    """Return (request, block index) of a name; None if it is not of this form."""
    first = int.from_bytes(name[:8], "little")
    number = first >> _INDEX_BITS
    if len(name) != NAME_BYTES or number != int.from_bytes(name[8:], "little"):
        return None
    return number, first & ((1 << _INDEX_BITS) - 1)

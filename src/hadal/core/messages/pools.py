"""Effects on one rank's KV pool; the other effects are in core/seams.

Requested by the leader of a unit. If the rank is another process, they are sent to it.
"""

from __future__ import annotations

import msgspec

from hadal.core.cache import DiskLocation
from hadal.core.messages.units import KvLease
from hadal.core.plans import NamedBlocks


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy the leased blocks into own blocks `into`, verify them, and answer with KvPulled."""

    request_id: str
    attempt: int
    lease: KvLease
    into: tuple[int, ...]
    rank: int = 0
    """Rank that owns the blocks `into`."""


class ReadBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read blocks of the disk cache into own blocks `into`, verify them, and answer with
    BlocksRead. Until then `into` must not be used otherwise.
    """

    read_id: int
    """Id that a leader never uses twice."""
    names: bytes
    locations: tuple[DiskLocation, ...]
    into: tuple[int, ...]
    rank: int = 0
    """Rank that owns the blocks `into`."""


class StoreBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write own blocks to the disk cache in the background, and answer with BlocksStored. Until
    then their contents must not change.
    """

    store_id: int
    """Id that a leader never uses twice."""
    names: bytes
    positions: tuple[int, ...]
    """Index of each block among its text's blocks, from 0."""
    block_ids: tuple[int, ...]
    rank: int = 0


class Named(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Notice that these blocks of a rank can be found by name from now on, until they are freed.
    The rank's host remembers them for the unit's next leader.
    """

    named: NamedBlocks
    rank: int
    are_all: bool = False
    """True if these replace all blocks that could be found before."""


class Freed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Notice that these blocks of a rank's pool were freed: raise their versions before they are
    used again (see KvLease).
    """

    block_ids: tuple[int, ...]
    rank: int = 0


PoolEffect = Pull | ReadBlocks | StoreBlocks | Freed | Named

"""Effects on one rank's KV pool; the other effects are in core/seams.

The leader of a unit asks for them; where the rank is another process they travel to it.
"""

from __future__ import annotations

import msgspec

from hadal.core.cache import DiskLocation
from hadal.core.messages.units import KvLease
from hadal.core.plans import NamedBlocks


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy the leased blocks into own blocks `into`, verify, and answer with KvPulled."""

    request_id: str
    attempt: int
    lease: KvLease
    into: tuple[int, ...]
    rank: int = 0
    """Whose blocks `into` are."""


class ReadBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read blocks of the disk cache into own blocks `into`, verify them, and answer with
    BlocksRead. Until then `into` must be nobody else's.
    """

    read_id: int
    """Never used twice by a leader."""
    names: bytes
    locations: tuple[DiskLocation, ...]
    into: tuple[int, ...]
    rank: int = 0
    """Whose blocks `into` are."""


class StoreBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write own blocks to the disk cache when there is time, and answer with BlocksStored. Until
    then they must stay as they are.
    """

    store_id: int
    """Never used twice by a leader."""
    names: bytes
    positions: tuple[int, ...]
    """Index of each block among its text's blocks: the first is 0."""
    block_ids: tuple[int, ...]
    rank: int = 0


class Named(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These blocks of a rank can be found by name from now on, until they are freed. It tells
    another leader, should the unit get one.
    """

    named: NamedBlocks
    rank: int
    are_all: bool = False
    """What could be found before can be found no more."""


class Freed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These blocks of a rank's pool were freed: raise their version before they are used again
    (see KvLease).
    """

    block_ids: tuple[int, ...]
    rank: int = 0


PoolEffect = Pull | ReadBlocks | StoreBlocks | Freed | Named

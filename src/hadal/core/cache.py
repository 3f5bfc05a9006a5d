"""What those who name, keep and move blocks of the KV cache have in common: sizes, locations on
disk, names of counts.

Holds no block and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

NAME_BYTES = 16
"""Bytes of a block's name (kv/names). Several names are one `bytes`, one behind the other: a chain,
if each names the block that follows the one before.
"""

MEMORY_HIT_TOKENS = "memory_hit_tokens"
"""Prompt tokens whose KV was found in a rank's pool."""
DISK_HIT_TOKENS = "disk_hit_tokens"
"""Prompt tokens whose KV was read from disk."""
MISS_TOKENS = "miss_tokens"
"""Prompt tokens that were computed."""
RECOMPUTED_TOKENS = "recomputed_tokens"
"""Prompt tokens that were computed although they were on disk: that was cheaper than to read them."""
MEMORY_BLOCKS = "memory_blocks"
"""Blocks in pools that can be found by name, in use or not. A level, not a total."""
DISK_BLOCKS = "disk_blocks"
"""Blocks on disk that this unit can find. A level, not a total."""
STORED_BLOCKS = "stored_blocks"
"""Blocks written to disk and durable."""
SKIPPED_BLOCKS = "skipped_blocks"
"""Blocks that were to be written and were not: the disk is full, fails or is too slow."""
DAMAGED_BLOCKS = "damaged_blocks"
"""Blocks that were read from disk and did not prove to be what they were taken for."""
EVICTED_BLOCKS = "evicted_blocks"
"""Blocks that made room for others in memory."""
DISK_EVICTED_BLOCKS = "disk_evicted_blocks"
"""Blocks on disk that made room for what this unit wrote."""
CACHE_LEVELS = (MEMORY_BLOCKS, DISK_BLOCKS)
CACHE_TOTALS = (
    MEMORY_HIT_TOKENS,
    DISK_HIT_TOKENS,
    MISS_TOKENS,
    RECOMPUTED_TOKENS,
    STORED_BLOCKS,
    SKIPPED_BLOCKS,
    DAMAGED_BLOCKS,
    EVICTED_BLOCKS,
    DISK_EVICTED_BLOCKS,
)
NO_NAME = bytes(NAME_BYTES)


class DiskLocation(msgspec.Struct, frozen=True, array_like=True):
    """Where a block lies on disk."""

    segment: int
    """Number of a segment file, unique in its folder for all time."""
    disk_slot: int


_DISK_SLOT_BITS = 32


def number_of(segment: int, disk_slot: int) -> int:
    """A location as one number: the disk slots of a segment are a row of them, and segments are far
    apart.
    """
    return segment << _DISK_SLOT_BITS | disk_slot


def location_of(number: int) -> DiskLocation:
    """The location that has it."""
    return DiskLocation(number >> _DISK_SLOT_BITS, number & ((1 << _DISK_SLOT_BITS) - 1))


def split(names: bytes) -> Iterator[bytes]:
    """The names in a chain, in order."""
    return (names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))


def slice_of(names: bytes, first: int, end: int) -> bytes:
    """The names from number `first` up to, not including, number `end`."""
    return names[first * NAME_BYTES : end * NAME_BYTES]


def num_names(names: bytes) -> int:
    """How many there are."""
    return len(names) // NAME_BYTES

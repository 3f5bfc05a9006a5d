"""Shared vocabulary of code that names, stores and transfers blocks of the KV cache: sizes, disk
locations, names of counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

NAME_BYTES = 16
"""Bytes of a block's name (kv/names). Several names are concatenated into one `bytes`. In a chain,
they name consecutive blocks of one text.
"""

MEMORY_HIT_TOKENS = "memory_hit_tokens"
"""Prompt tokens with KV found in a rank's pool."""
DISK_HIT_TOKENS = "disk_hit_tokens"
"""Prompt tokens with KV read from disk."""
MISS_TOKENS = "miss_tokens"
"""Prompt tokens that were computed."""
RECOMPUTED_TOKENS = "recomputed_tokens"
"""Prompt tokens that were computed although they were on disk, because that was cheaper than to read them."""
MEMORY_BLOCKS = "memory_blocks"
"""Blocks in pools that can be found by name, in use or not. A gauge, not a counter."""
DISK_BLOCKS = "disk_blocks"
"""Blocks on disk that this unit can find. A gauge, not a counter."""
STORED_BLOCKS = "stored_blocks"
"""Blocks written to disk and durable."""
SKIPPED_BLOCKS = "skipped_blocks"
"""Blocks not written to disk: it is full, fails or is slow, or their memory was reused or lost."""
DAMAGED_BLOCKS = "damaged_blocks"
"""Blocks read from disk with contents that did not match their names."""
EVICTED_BLOCKS = "evicted_blocks"
"""Blocks in memory that were replaced by others."""
DISK_EVICTED_BLOCKS = "disk_evicted_blocks"
"""Blocks on disk that were replaced by blocks this unit wrote."""
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
    """Location of a block on disk."""

    segment: int
    """Number of a segment file, unique in its folder for all time."""
    disk_slot: int


_DISK_SLOT_BITS = 32


def number_of(segment: int, disk_slot: int) -> int:
    """Return a location as one number, 2^32 * segment + disk_slot."""
    return segment << _DISK_SLOT_BITS | disk_slot


def location_of(number: int) -> DiskLocation:
    """Return the location encoded by `number_of`."""
    return DiskLocation(number >> _DISK_SLOT_BITS, number & ((1 << _DISK_SLOT_BITS) - 1))


def split(names: bytes) -> Iterator[bytes]:
    """Return an iterator over the names in a chain, in order."""
    return (names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))


def slice_of(names: bytes, first: int, end: int) -> bytes:
    """Return the names from index `first` up to, but not including, index `end`."""
    return names[first * NAME_BYTES : end * NAME_BYTES]


def num_names(names: bytes) -> int:
    """Return how many names are concatenated in `names`."""
    return len(names) // NAME_BYTES

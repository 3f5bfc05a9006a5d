"""Blocks that a leader can find on disk: block name -> location, as reported by runtime/store/view
and by the leader's own writes.

A name and its location take about 180 bytes (docs/decisions/001), so millions of blocks fit into a
leader's memory. Does not depend on files. A location may contain another block by now, so readers
verify it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hadal.core.cache import DiskLocation, location_of, num_names, number_of, split


class BlockIndex(Protocol):
    """Index of the blocks on disk, as used by a leader. DiskIndex is the live one; a simulated
    world answers without names, from its own disk (lab/sim/world/disk).
    """

    def __len__(self) -> int: ...

    def __contains__(self, name: bytes) -> bool: ...

    def put(self, names: bytes, locations: Sequence[DiskLocation | None]) -> None: ...

    def drop(self, names: bytes) -> None: ...

    def found(self, names: bytes) -> tuple[DiskLocation, ...]: ...

    def num_found(self, chain: bytes) -> int: ...

    def lookup(self, chain: bytes) -> tuple[DiskLocation, ...]: ...


class DiskIndex:
    """Index of blocks on disk. Locations are stored as numbers, and a DiskLocation is made per query."""

    def __init__(self) -> None:
        self._name_to_number: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._name_to_number)

    def __contains__(self, name: bytes) -> bool:
        return name in self._name_to_number

    def put(self, names: bytes, locations: Sequence[DiskLocation | None]) -> None:
        """Add or move these blocks. A location of None is skipped: that block was not written."""
        if num_names(names) != len(locations):
            raise ValueError(f"{len(locations)} locations do not fit {num_names(names)} names.")
        for name, location in zip(split(names), locations, strict=True):
            if location is not None:
                self._name_to_number[name] = number_of(location.segment, location.disk_slot)

    def drop(self, names: bytes) -> None:
        """Remove these blocks; unknown names are ignored."""
        for name in split(names):
            self._name_to_number.pop(name, None)

    def find(self, name: bytes) -> DiskLocation | None:
        """Return the location of a block, or None if it is not in the index."""
        number = self._name_to_number.get(name)
        return None if number is None else location_of(number)

    def found(self, names: bytes) -> tuple[DiskLocation, ...]:
        """Return the locations of the blocks that are in the index, in the order of `names`."""
        return tuple(location for name in split(names) if (location := self.find(name)) is not None)

    def num_found(self, chain: bytes) -> int:
        """Return the length of the longest prefix of the chain that is in the index, in blocks."""
        num = 0
        for name in split(chain):
            if name not in self._name_to_number:
                break
            num += 1
        return num

    def lookup(self, chain: bytes) -> tuple[DiskLocation, ...]:
        """Return the locations of the longest prefix of the chain that is in the index."""
        locations = []
        for name in split(chain):
            number = self._name_to_number.get(name)
            if number is None:
                break
            locations.append(location_of(number))
        return tuple(locations)

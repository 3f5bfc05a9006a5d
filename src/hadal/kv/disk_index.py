"""What a leader can find on disk: names of blocks to their locations, as runtime/store/view reports
them.

A name and its location take about 180 bytes (LOG.md), so millions of blocks fit beside the leader's
other state. Knows nothing of files. A location may hold another block by now: readers verify it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hadal.core.cache import DiskLocation, location_of, num_names, number_of, split


class BlockIndex(Protocol):
    """What a leader asks of an index of the blocks on disk. DiskIndex is the one that serves; a
    simulated world knows without names what its disk has (lab/sim/world/disk).
    """

    def __len__(self) -> int: ...

    def __contains__(self, name: bytes) -> bool: ...

    def put(self, names: bytes, locations: Sequence[DiskLocation | None]) -> None: ...

    def drop(self, names: bytes) -> None: ...

    def found(self, names: bytes) -> tuple[DiskLocation, ...]: ...

    def num_found(self, chain: bytes) -> int: ...

    def lookup(self, chain: bytes) -> tuple[DiskLocation, ...]: ...


class DiskIndex:
    """Locations are kept as numbers: a DiskLocation is made when somebody asks."""

    def __init__(self) -> None:
        self._name_to_number: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._name_to_number)

    def __contains__(self, name: bytes) -> bool:
        return name in self._name_to_number

    def put(self, names: bytes, locations: Sequence[DiskLocation | None]) -> None:
        """These blocks can be found; a name that is known already is somewhere else now. None: that
        one cannot.
        """
        if num_names(names) != len(locations):
            raise ValueError(f"{len(locations)} locations for {num_names(names)} names.")
        for name, location in zip(split(names), locations, strict=True):
            if location is not None:
                self._name_to_number[name] = number_of(location.segment, location.disk_slot)

    def drop(self, names: bytes) -> None:
        """These cannot be found any more; unknown names are passed over."""
        for name in split(names):
            self._name_to_number.pop(name, None)

    def find(self, name: bytes) -> DiskLocation | None:
        """Where a block is."""
        number = self._name_to_number.get(name)
        return None if number is None else location_of(number)

    def found(self, names: bytes) -> tuple[DiskLocation, ...]:
        """Where those of these blocks are that are here."""
        return tuple(location for name in split(names) if (location := self.find(name)) is not None)

    def num_found(self, chain: bytes) -> int:
        """How many of the chain's first blocks are here, up to one that is not."""
        num = 0
        for name in split(chain):
            if name not in self._name_to_number:
                break
            num += 1
        return num

    def lookup(self, chain: bytes) -> tuple[DiskLocation, ...]:
        """The locations of the longest prefix of the chain that is here."""
        locations = []
        for name in split(chain):
            number = self._name_to_number.get(name)
            if number is None:
                break
            locations.append(location_of(number))
        return tuple(locations)

"""A folder that all processes of a world share, and its faults.

A load compares a block's name and location with the request, so stale or missing blocks are misses,
as with checksums live. Reads and writes of a process run in order and touch its pool when
they end: blocks freed or written too early show. Watchers get changes a little late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from hadal.core.cache import DiskLocation, split
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.pools import ReadBlocks, StoreBlocks
from hadal.core.plans import BlocksRead, BlocksStored
from hadal.core.seams import DiskNews
from hadal.lab.sim.world.clock import SimClock
from tests.sim.engine import Cells, Pool


@dataclass
class DiskFaults:
    """Rates of disk faults."""

    load_rate: float = 0.0
    """Share of read blocks at which the read fails."""
    damage_rate: float = 0.0
    """Share of read blocks with damaged content, which fails the read, too."""
    store_rate: float = 0.0
    """Share of blocks that a write does not store."""
    drop_rate: float = 0.0
    """Share of reads before which some block leaves the folder."""
    slow_rate: float = 0.0
    """Share of reads and writes that take up to `slow_s` seconds."""
    slow_s: float = 8.0


@dataclass
class _Watcher:
    tell: Callable[[DiskNews], None]
    told: dict[bytes, DiskLocation] = field(default_factory=dict)
    is_told: bool = False
    is_due: bool = False


class SimDisk:
    """Shared folder of at most `num_disk_slots` blocks; new blocks displace the oldest."""

    def __init__(
        self,
        clock: SimClock,
        random: Random,
        num_disk_slots: int,
        faults: DiskFaults,
        verify: Callable[[bytes, Cells], None],
    ) -> None:
        """`verify` is called with the name and the cells of each block that is written."""
        self.faults = faults
        self.name_to_location: dict[bytes, DiskLocation] = {}
        """Name -> location, in the order of writing."""
        self.num_used = 0
        self._cells: dict[DiskLocation, Cells] = {}
        self._clock = clock
        self._random = random
        self._num_disk_slots = num_disk_slots
        self._verify = verify
        self._num_written = 0
        self._watchers: list[_Watcher] = []

    def watch(self, tell: Callable[[DiskNews], None]) -> None:
        """Call `tell` with the blocks of the folder, and later with each change."""
        self._watchers.append(_Watcher(tell))
        self._changed()

    def delay_s(self, num_blocks: int) -> float:
        """Return the seconds that a read or write of `num_blocks` blocks takes."""
        if self._random.random() < self.faults.slow_rate:
            return self.faults.slow_s * self._random.random()
        return self._random.uniform(0.0, 0.004 + 0.001 * num_blocks)

    def read(self, effect: ReadBlocks, pool: Pool) -> BlocksRead:
        """Execute a load now, and return its result."""
        # One location and one block for each name of 16 bytes.
        assert len(effect.names) == 16 * len(effect.locations) == 16 * len(effect.into)
        if self.name_to_location and self._random.random() < self.faults.drop_rate:
            self._drop(self._random.choice(list(self.name_to_location)))
        for at, (name, location, block) in enumerate(
            zip(split(effect.names), effect.locations, effect.into, strict=True)
        ):
            chance = self._random.random()
            if chance < self.faults.load_rate:
                return BlocksRead(effect.read_id, at, 0, "input/output error")
            if chance < self.faults.load_rate + self.faults.damage_rate:
                # The damage is found only after the block was overwritten.
                pool.cells[block] = np.arange(BLOCK_TOKENS, dtype=np.uint64)
                return BlocksRead(effect.read_id, at, 1, "checksum")
            if self.name_to_location.get(name) != location:
                return BlocksRead(effect.read_id, at, 0, "gone")
            pool.cells[block] = self._cells[location]
        return BlocksRead(effect.read_id, len(effect.into))

    def write(self, effect: StoreBlocks, pool: Pool) -> BlocksStored:
        """Execute a store now, and return its result."""
        locations: list[DiskLocation | None] = []
        dropped = []
        for name, block in zip(split(effect.names), effect.block_ids, strict=True):
            self._verify(name, pool.cells[block])
            if self._random.random() < self.faults.store_rate:
                locations.append(None)
                continue
            while len(self.name_to_location) >= self._num_disk_slots:
                dropped.append(next(iter(self.name_to_location)))
                self._drop(dropped[-1])
            location = self.name_to_location.get(name) or DiskLocation(0, self._num_written)
            self._num_written += 1
            self.name_to_location[name] = location
            self._cells[location] = pool.cells[block].copy()
            locations.append(location)
        self._changed()
        error = "no space left" if None in locations else None
        return BlocksStored(effect.store_id, tuple(locations), b"".join(dropped), error)

    def used(self, locations: tuple[DiskLocation, ...]) -> None:
        assert locations
        self.num_used += len(locations)

    def _drop(self, name: bytes) -> None:
        del self._cells[self.name_to_location.pop(name)]
        self._changed()

    def _changed(self) -> None:
        for watcher in self._watchers:
            if not watcher.is_due:
                watcher.is_due = True
                self._clock.after(
                    self._random.uniform(0.0, 0.3), lambda one=watcher: self._say(one)
                )

    def _say(self, watcher: _Watcher) -> None:
        watcher.is_due = False
        now, told = self.name_to_location, watcher.told
        added = {name: location for name, location in now.items() if told.get(name) != location}
        dropped = [name for name in told if name not in now]
        watcher.told = dict(now)
        if added or dropped or not watcher.is_told:
            watcher.is_told = True
            watcher.tell(DiskNews(b"".join(added), tuple(added.values()), b"".join(dropped)))

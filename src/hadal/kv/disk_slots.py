"""Disk slots of one writer: free slots, the block in each other slot, and evictions
(policy/eviction).

    free -- take --> being written -- wrote --> kept -- take, for others --> being written
      ^                   |                       |
      +-------------------+-------- drop ---------+

Blocks that are written together get adjacent disk slots if there are any. Other processes count
uses and are polled, so uses arrive late. Does not depend on files or on other writers' blocks.
Unlike kv/blocks, it has no record of the block that follows another, so among blocks used together
it evicts the deepest first.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.core.cache import DiskLocation, location_of, number_of
from hadal.core.errors import InvariantError
from hadal.kv.free_runs import FreeRuns
from hadal.policy.eviction import Arc, Lru

MAX_SEGMENT_SLOTS = 1 << 31
"""Maximum number of disk slots of a segment: small enough that the numbers of two segments' slots
are never adjacent.
"""


class DiskSlots:
    """Disk slots of one writer. Segments can be added at any time; the capacity is the sum of their slots."""

    def __init__(self, eviction: type[Arc | Lru] = Arc) -> None:
        self._segment_to_names: dict[int, list[bytes | None]] = {}
        """Segment -> names of its blocks, by disk slot."""
        self._name_to_number: dict[bytes, int] = {}
        self._free = FreeRuns()
        self._writing: set[bytes] = set()
        self._eviction = eviction(0)

    def __len__(self) -> int:
        """Return the number of blocks with a disk slot."""
        return len(self._name_to_number)

    @property
    def num_slots(self) -> int:
        return self._eviction.capacity

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, name: bytes) -> DiskLocation | None:
        """Return the location of a block that is, or is being, written; None if it has no slot."""
        number = self._name_to_number.get(name)
        return None if number is None else location_of(number)

    def add_segment(self, segment: int, num_disk_slots: int) -> None:
        """Add a segment of free disk slots."""
        if segment in self._segment_to_names or not 0 < num_disk_slots <= MAX_SEGMENT_SLOTS:
            raise ValueError(f"segment {segment} exists, or cannot have {num_disk_slots} slots.")
        self._segment_to_names[segment] = [None] * num_disk_slots
        self._free.add(number_of(segment, 0), num_disk_slots)
        self._eviction.capacity += num_disk_slots

    def remove_segment(self, segment: int) -> None:
        """Remove a segment, its disk slots and their blocks."""
        names = self._segment_to_names[segment]
        self.drop([name for name in names if name is not None])
        self._free.remove(lambda number: location_of(number).segment == segment)
        self._eviction.capacity -= len(names)
        del self._segment_to_names[segment]

    def restore(
        self,
        segment: int,
        disk_slots: Sequence[int],
        names: Sequence[bytes],
        positions: Sequence[int],
        uses: Sequence[int] = (),
    ) -> None:
        """Register the blocks found in an added segment. `uses`: number of uses of each, if known.

        A name that has a slot already is ignored, and its disk slot here is free.
        """
        row = self._segment_to_names[segment]
        if any(name is not None for name in row):
            raise InvariantError(f"segment {segment} was restored or written already.")
        self._eviction.tick()
        for index, (slot, name, position) in enumerate(
            zip(disk_slots, names, positions, strict=True)
        ):
            if name not in self._name_to_number:
                row[slot] = name
                self._name_to_number[name] = number_of(segment, slot)
                self._eviction.add(name, position)
                if uses and uses[index]:
                    self._eviction.use(name)
                self._eviction.offer(name)
        self._free.remove(lambda number: location_of(number).segment == segment)
        for slot, held in enumerate(row):
            if held is None:
                self._free.add(number_of(segment, slot))

    def take(
        self, names: Sequence[bytes], positions: Sequence[int]
    ) -> tuple[list[DiskLocation | None], bytes]:
        """Assign disk slots to new blocks, which are to be written now. `positions`: index of each
        block in its text.

        Returns a location for each block, None for the last ones if too many disk slots are being
        written; and the names of evicted blocks, which must no longer be found. Raises
        InvariantError if a name has a disk slot already.
        """
        if len(set(names)) != len(names) or any(name in self._name_to_number for name in names):
            raise InvariantError("a block is stored twice, or has a slot already.")
        dropped = bytearray()
        while len(self._free) < len(names) and (victim := self._eviction.victim()) is not None:
            dropped += victim
            self._give_back(victim)
        self._eviction.tick()
        locations: list[DiskLocation | None] = []
        while (
            len(locations) < len(names)
            and (run := self._free.take(len(names) - len(locations))) is not None
        ):
            first, count = run
            for number in range(first, first + count):
                name, location = names[len(locations)], location_of(number)
                self._segment_to_names[location.segment][location.disk_slot] = name
                self._name_to_number[name] = number
                self._writing.add(name)
                self._eviction.add(name, positions[len(locations)])
                locations.append(location)
        return locations + [None] * (len(names) - len(locations)), bytes(dropped)

    def wrote(self, names: Sequence[bytes]) -> None:
        """Mark blocks as written: from now on they may be evicted. Names without a disk slot are ignored."""
        for name in names:
            if name in self._writing:
                self._writing.discard(name)
                self._eviction.offer(name)

    def drop(self, names: Sequence[bytes]) -> None:
        """Remove blocks that are missing or damaged on disk; names without a disk slot are ignored."""
        for name in names:
            if name in self._name_to_number:
                self._writing.discard(name)
                self._eviction.remove(name)
                self._give_back(name)

    def drop_at(self, segment: int, disk_slots: Sequence[int]) -> None:
        """Remove the blocks in these disk slots, which are damaged; free slots are ignored."""
        row = self._segment_to_names[segment]
        self.drop([name for slot in disk_slots if (name := row[slot]) is not None])

    def used(self, segment: int, disk_slots: Sequence[int], counts: Sequence[int]) -> None:
        """Count uses of a segment's blocks: `counts[i]` uses of `disk_slots[i]` since the last report."""
        self._eviction.tick()
        row = self._segment_to_names[segment]
        for slot, count in zip(disk_slots, counts, strict=True):
            name = row[slot]
            # Counts of a slot being written belong to its previous block.
            if count and name is not None and name not in self._writing:
                self._eviction.use(name)

    def check(self) -> list[str]:
        """Return problems; empty if every disk slot is free or has one block, and the eviction
        policy has exactly the written blocks as candidates.
        """
        problems = self._free.check()
        held = {
            name: number_of(segment, slot)
            for segment, row in self._segment_to_names.items()
            for slot, name in enumerate(row)
            if name is not None
        }
        if held != self._name_to_number:
            problems.append("names and slots do not agree")
        free = {slot for first, count in self._free for slot in range(first, first + count)}
        if free & set(held.values()) or len(free) + len(held) != self.num_slots:
            problems.append(f"{len(free)} free and {len(held)} used slots are not {self.num_slots}")
        if self.num_slots != sum(map(len, self._segment_to_names.values())):
            problems.append("the number of slots is wrong")
        if not self._writing <= held.keys():
            problems.append("a block without a slot is being written")
        if len(self._eviction) != len(held) or self._eviction.num_offered != len(held) - len(
            self._writing
        ):
            problems.append("the eviction's blocks are not those with slots")
        return problems

    def _give_back(self, name: bytes) -> None:
        number = self._name_to_number.pop(name)
        location = location_of(number)
        self._segment_to_names[location.segment][location.disk_slot] = None
        self._free.add(number)

"""Blocks of one writer of the disk cache. kv/disk_slots chooses a block's slot, and
runtime/store/segments maps slots to files. This module writes the bytes in the order that
survives `kill -9`, and reads the records back afterwards.

Independent of pools, queues and deadlines.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.core.cache import DiskLocation, number_of
from hadal.kv.disk_slots import DiskSlots
from hadal.kv.runs import runs
from hadal.runtime.store.owned_segments import OwnSegments
from hadal.runtime.store.segments import POSITION, SEQUENCE, Bytes, Segment, SegmentError, names_of
from hadal.runtime.store.troubles import Troubles

GROW_PAUSE_S = 30.0
"""Pause after a segment could not be adopted or created."""
_SEQUENCE_MAX = 1 << 62
"""Upper limit of valid sequences in damage marks: counting never reaches it, a corrupt mark may."""
POLL_S = 2.0
"""Seconds between reads of readers' marks in the segments, while blocks are written."""


@dataclass
class Block:
    """One block on its way to disk: its bytes are in row `row` of a buffer."""

    name: bytes
    position: int
    sum: bytes
    row: int
    location: DiskLocation | None = None
    """Disk location that `place` assigned, or None. A crash before `sync` may lose the block."""
    is_new: bool = False
    """True if the block has to be written, False if it was on disk before or got no slot."""
    sequence: int = 0
    is_durable: bool = False


class OwnBlocks:
    """Blocks that this writer keeps. Called from the writer's thread alone, except for `write`."""

    def __init__(self, segments: OwnSegments, troubles: Troubles) -> None:
        self._segments = segments
        self._troubles = troubles
        self._slots = DiskSlots()
        self._sequence = 1
        self._segment_to_uses: dict[int, NDArray[np.uint32]] = {}
        self._segment_to_reader_word: dict[int, int] = {}
        self._grow_at_s = self._poll_at_s = 0.0

    @property
    def num_blocks(self) -> int:
        """Number of blocks with a slot."""
        return len(self._slots)

    def enter(self) -> None:
        """Adopt dead writers' segments. Raises OSError."""
        for segment in self._segments.enter():
            self._take_up(segment)

    def place(self, blocks: list[Block]) -> bytes:
        """Assign slots to blocks. Return the names of the evicted blocks. A block without a
        location got no slot; a block that is on disk already is not `is_new`. Raises OSError or
        SegmentError if no segment is available.
        """
        if self._segments.make_folder():  # It was deleted, together with its segments.
            self._troubles.note_gone()
            self._drop_lost()
            self._grow_at_s = 0.0
        self._poll_if_due()
        self._grow(len(self._new(blocks)))
        new = self._new(blocks)  # Again: adopted segments may contain some of the blocks.
        locations, dropped = self._slots.take(
            [one.name for one in new], [one.position for one in new]
        )
        for block, location in zip(new, locations, strict=True):
            block.location, block.is_new, block.sequence = (
                location,
                location is not None,
                self._sequence,
            )
            self._sequence += 1
        for block in blocks:
            if block.location is None:
                block.location = self._slots.find(block.name)
        return dropped

    def _new(self, blocks: list[Block]) -> list[Block]:
        return list(
            {one.name: one for one in blocks if self._slots.find(one.name) is None}.values()
        )

    def write(self, blocks: list[Block], buffer: Bytes) -> None:
        """Write new blocks, from their rows of the buffer, and their records. Any thread may call
        it, because it touches only files; afterwards the writer's thread calls `fail` or `sync`.
        Raises OSError or SegmentError.
        """
        for run in _runs([one for one in blocks if one.is_new]):
            assert run[0].location is not None
            segment, first = (
                self._segments.segments[run[0].location.segment],
                run[0].location.disk_slot,
            )
            names, positions, sums = zip(
                *((one.name, one.position, one.sum) for one in run), strict=True
            )
            records = segment.records(first, names, positions, sums, [one.sequence for one in run])
            segment.clear(first, len(run))
            segment.write_blocks(first, buffer[run[0].row : run[0].row + len(run)])
            segment.write_records(first, records)

    def fail(self, blocks: list[Block]) -> None:
        """Free the slots of blocks that the disk failed to store, and clear their records, which
        may have been written.
        """
        for block in blocks:
            if (
                not block.is_new
                or block.location is None
                or self._slots.find(block.name) != block.location
            ):
                continue  # Blocks that were on disk before are still there.
            self._slots.drop([block.name])
            segment = self._segments.segments.get(block.location.segment)
            try:
                if segment is not None:
                    segment.clear(block.location.disk_slot, 1)
            except (OSError, SegmentError) as error:
                self._troubles.note_error(
                    "clear", error
                )  # Harmless: a block is used only if its sum matches.
            block.location = None

    def sync(self, blocks: list[Block]) -> None:
        """Make written blocks durable and publish them to readers. Raises OSError or SegmentError
        if some of them are not durable.
        """
        trouble: OSError | SegmentError | None = None
        number_to_blocks: dict[int, list[Block]] = {}
        for block in blocks:
            if block.location is not None and self._slots.find(block.name) == block.location:
                number_to_blocks.setdefault(block.location.segment, []).append(block)
        for number, here in number_to_blocks.items():
            try:
                self._sync_segment(number)
            except (OSError, SegmentError) as error:
                self.fail(here)
                trouble = error
                continue
            self._slots.wrote([one.name for one in here])
            for block in here:
                block.is_durable = True
        if trouble is not None:
            self._drop_lost()
            raise trouble

    def sweep(self) -> None:
        """Delete unowned segments beyond the budget. Raises OSError."""
        self._segments.sweep()

    def close(self) -> None:
        self._segments.close()

    def _sync_segment(self, number: int) -> None:
        segment = self._segments.segments.get(number)
        if segment is None:
            raise SegmentError("its segment was lost")
        segment.sync()
        if not segment.is_whole():
            raise SegmentError(f"{segment.path.name} was removed or cut off")
        segment.tell_change()

    def _drop_lost(self) -> None:
        """Close segments that were removed or cut off: readers no longer find their blocks."""
        for number, segment in list(self._segments.segments.items()):
            try:
                is_whole = segment.is_whole()
            except OSError as error:
                self._troubles.note_error("look at", error)
                continue
            if not is_whole:
                self._slots.remove_segment(number)
                self._segments.lose(number)

    def _grow(self, num_blocks: int) -> None:
        """Get free slots for `num_blocks` blocks, as far as the share allows. Dead writers'
        segments come first, because they contain blocks.
        """
        now_s = time.monotonic()
        while self._slots.num_free < num_blocks and now_s >= self._grow_at_s:
            try:
                adopted = self._segments.adopt(1)
                for segment in adopted:
                    self._take_up(segment)
                if not adopted:
                    created = self._segments.create()
                    if created is None:
                        return
                    self._slots.add_segment(created.number, created.num_slots)
            except (OSError, SegmentError) as error:
                self._troubles.note_error("grow", error)
                self._grow_at_s = now_s + GROW_PAUSE_S
                if not self._segments.segments:
                    raise

    def _take_up(self, segment: Segment) -> None:
        """Restore an adopted segment. If its index is unreadable, refuse it; the others stay."""
        try:
            self._restore(segment)
        except (OSError, SegmentError) as error:
            self._troubles.note_error("adopt", error)
            self._segments.refuse(segment.number)

    def _restore(self, segment: Segment) -> None:
        """Rebuild the index from the whole records (recovery)."""
        records, uses, damaged = segment.table(), segment.uses(), segment.damaged()
        is_whole = segment.is_good(records)
        (slots,) = np.nonzero(is_whole & (damaged != records[:, SEQUENCE]))
        good = records[slots]
        segment.tell_change()  # The dead writer may not have announced its last change.
        is_empty = ~records.any(axis=1)
        num_damaged = len(records) - int(is_empty.sum()) - len(slots)
        if num_damaged:
            self._troubles.note(
                "damaged", f"{segment.path.name}: {num_damaged} records are damaged and not used"
            )
        self._slots.add_segment(segment.number, segment.num_slots)
        self._slots.restore(
            segment.number,
            slots.tolist(),
            names_of(good),
            good[:, POSITION].tolist(),
            uses[slots].tolist(),
        )
        # Start above the sequences of all records, and above those marked damaged: readers would
        # reject a new record with a marked sequence in the same slot.
        used = *records[is_whole, SEQUENCE].tolist(), *damaged[damaged < _SEQUENCE_MAX].tolist()
        self._sequence = max(self._sequence, max(used, default=0) + 1)
        self._segment_to_uses[segment.number] = uses

    def _poll_if_due(self) -> None:
        """Read the marks of readers, if that is due: uses, and blocks that proved damaged."""
        now_s = time.monotonic()
        if now_s < self._poll_at_s:
            return
        self._poll_at_s = now_s + POLL_S
        for number, segment in list(self._segments.segments.items()):
            try:
                self._poll(segment)
            except (OSError, SegmentError) as error:
                self._troubles.note_error("look at", error)
                self._drop_lost()
                self._segment_to_uses.pop(number, None)

    def _poll(self, segment: Segment) -> None:
        uses = segment.uses()
        counts = uses - self._segment_to_uses.get(segment.number, np.zeros_like(uses))
        self._segment_to_uses[segment.number] = uses
        (slots,) = np.nonzero(counts)
        if len(slots):
            self._slots.used(segment.number, slots.tolist(), counts[slots].tolist())
        _, readers = segment.changes()
        if readers != self._segment_to_reader_word.get(segment.number, 0):
            self._segment_to_reader_word[segment.number] = readers
            records = segment.table()
            is_damaged = (segment.damaged() == records[:, SEQUENCE]) & (records[:, SEQUENCE] != 0)
            (slots,) = np.nonzero(is_damaged)
            self._slots.drop_at(segment.number, slots.tolist())


def _runs(blocks: list[Block]) -> list[list[Block]]:
    """Group blocks that are adjacent both on disk and in the buffer: each group is one write."""
    ordered = sorted(blocks, key=_location_number)
    cut = runs([_location_number(block) for block in ordered], [block.row for block in ordered])
    return [ordered[at : at + count] for at, count in cut]


def _location_number(block: Block) -> int:
    assert block.location is not None
    return number_of(block.location.segment, block.location.disk_slot)

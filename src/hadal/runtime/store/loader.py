"""Loads from the disk cache into a KV pool. A block is verified before any byte reaches the pool.

    disk -> private buffer -> name and sum agree? -> pool

A load is cut into pieces, which several threads read in parallel. A disk may hang: a load without
progress for a while is answered with the blocks read so far. Its thread stays blocked, with its own
buffer, and late data is dropped, so the blocks of the pool are free after the answer. While all
threads hang, loads fail immediately.

Uses only the names and locations of its loads: a block that is not at its location is gone.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hadal.core.cache import number_of, split
from hadal.core.messages.pools import ReadBlocks
from hadal.core.plans import BlocksRead
from hadal.kv.runs import runs
from hadal.runtime.store.buffers import make_buffer
from hadal.runtime.store.segments import (
    NAME,
    SEQUENCE,
    SUM,
    Bytes,
    Segment,
    SegmentError,
    Words,
    sum_of,
)
from hadal.runtime.store.troubles import Troubles
from hadal.runtime.worker import Worker

NUM_THREADS = 3
"""Number of threads: one copies and verifies while the others wait for the disk."""
PIECE_BYTES = 2 * 1024 * 1024
"""Size of a thread's buffer: large enough for fast reads, small enough that data is verified while
it is in the CPU's cache.
"""
READ_DEADLINE_S = 10.0
"""Longest time of a load without progress; then it is given up."""
READ_TOTAL_S = 60.0
"""Longest time of a load, even with progress; then it is given up."""
_MAX_OPEN = 64


@dataclass
class _Load:
    effect: ReadBlocks
    names: list[bytes]
    begun_s: float
    moved_s: float
    outcomes: list[_ProvedSlots | None]
    """Outcome of each piece; None: not done."""
    is_running: bool = False
    num_copying: int = 0
    """Number of pieces being copied into the pool now: the load is not given up meanwhile."""
    is_over: bool = False

    def outcome(self) -> _ProvedSlots:
        """Return the outcome of the load up to the first piece that failed or is not done."""
        num_good = 0
        for piece in self.outcomes:
            if piece is None:
                break
            num_good += piece.num_good
            if piece.error is not None:
                return _ProvedSlots(num_good, piece.num_damaged, piece.error)
        return _ProvedSlots(num_good)


@dataclass
class _ProvedSlots:
    """Result of verifying adjacent disk slots: the number of good blocks from the first one on, and
    the reason for their end.
    """

    num_good: int
    num_damaged: int = 0
    error: str | None = None


@dataclass
class _LoadPiece:
    """Locations begin .. end-1 of a load: adjacent disk slots of one segment."""

    load: _Load
    index: int
    begin: int
    end: int


@dataclass
class _PieceReader:
    """Buffer and open segments of a thread that reads a piece."""

    buffer: Bytes
    load: _Load | None = None
    """Load that the thread reads for; None while it reads nothing."""
    segments: OrderedDict[int, Segment] = field(default_factory=OrderedDict)
    """Open segments, least recently used first."""


class Loader:
    """Runner of ReadBlocks effects in threads. The host's thread calls submit, take and stop."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        blocks: Bytes,
        troubles: Troubles,
        wake: Callable[[], None],
        deadline_s: float = READ_DEADLINE_S,
    ) -> None:
        """`blocks`: the pool, [blocks, block_bytes]."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._blocks = blocks
        self._troubles = troubles
        self._wake = wake
        self._deadline_s = deadline_s
        self._loads: deque[_Load] = deque()
        """Unanswered loads, in order of arrival."""
        self._readers = [
            _PieceReader(make_buffer(blocks.shape[1], PIECE_BYTES)) for _ in range(NUM_THREADS)
        ]
        self._free = deque(self._readers)
        self._worker: Worker[_LoadPiece, BlocksRead] = Worker(
            "disk-load", self._run, wake, num_threads=NUM_THREADS
        )
        self._lock = self._worker.changed
        """Lock of worker and loads: no load is given up while one of its pieces is copied."""
        self._worker.start()

    def submit(self, effect: ReadBlocks) -> None:
        """Begin a load; `take` returns its outcome."""
        now_s = time.monotonic()
        pieces = _pieces(effect, len(self._readers[0].buffer))
        load = _Load(effect, list(split(effect.names)), now_s, now_s, [None] * len(pieces))
        if not len(load.names) == len(effect.locations) == len(effect.into):
            raise ValueError(
                f"load {effect.read_id} has {len(load.names)} names, {len(effect.locations)}"
                f" locations, {len(effect.into)} blocks"
            )
        with self._lock:
            self._loads.append(load)
            if not pieces:
                self._end(load)
        for index, (begin, end) in enumerate(pieces):
            self._worker.submit(_LoadPiece(load, index, begin, end))
        if not pieces:
            self._wake()

    def take(self) -> list[BlocksRead]:
        """Return the outcomes that are ready, and give up loads that wait too long for the disk.
        Raises the exception of a thread, if any.
        """
        now_s = time.monotonic()
        with self._lock:
            do_all_hang = all(
                reader.load is not None and reader.load.is_over for reader in self._readers
            )
            for load in list(self._loads):
                stood_s = now_s - load.moved_s
                is_stuck = load.is_running and not load.num_copying and stood_s > self._deadline_s
                is_late = not load.num_copying and now_s - load.begun_s > READ_TOTAL_S
                if is_stuck or is_late or (do_all_hang and not load.is_running):
                    text = (
                        f"the disk has not answered for {stood_s:.0f} s"
                        if not do_all_hang
                        else "the disk hangs"
                    )
                    self._troubles.note("hang", f"{text}; its KV is computed instead")
                    self._end(load, text)
            return self._worker.take()

    def stop(self, deadline_s: float) -> None:
        """End the threads by `deadline_s` (time.monotonic). A thread that hangs is left alone."""
        # A running copy is finished, and no other copy begins.
        self._worker.stop(deadline_s - time.monotonic())
        for reader in self._free:
            for segment in reader.segments.values():
                segment.close()

    # ---- in the threads ----
    def _run(self, piece: _LoadPiece) -> None:
        reader = self._free.pop()
        try:
            self._do(reader, piece)
        finally:
            self._free.append(reader)

    def _do(self, reader: _PieceReader, piece: _LoadPiece) -> None:
        load = piece.load
        with self._lock:
            if load.is_over or self._worker.is_stopping:
                return
            is_wanted = load.outcome().error is None
            reader.load = load
            if not load.is_running:
                load.is_running, load.moved_s = True, time.monotonic()
        found = (
            self._try_to_read(reader, piece)
            if is_wanted
            else _ProvedSlots(0, 0, "a block before it is missing")
        )
        if not self._may_copy(reader, load):
            return
        into = list(load.effect.into[piece.begin : piece.begin + found.num_good])
        self._blocks[into] = reader.buffer[: found.num_good, : self._blocks.shape[1]]
        with self._lock:
            load.num_copying -= 1
            load.moved_s = time.monotonic()
            load.outcomes[piece.index] = found
            is_last = None not in load.outcomes
            if is_last:
                self._end(load)
        if is_last:
            self._wake()

    def _may_copy(self, reader: _PieceReader, load: _Load) -> bool:
        """Return True if the load still owns its blocks; then it owns them until the copy ends."""
        with self._lock:
            reader.load = None
            if load.is_over or self._worker.is_stopping:
                return False
            load.num_copying += 1
        return True

    def _try_to_read(self, reader: _PieceReader, piece: _LoadPiece) -> _ProvedSlots:
        try:
            found = self._read(reader, piece.load, piece.begin, piece.end)
        except FileNotFoundError:
            found = _ProvedSlots(0, 0, "its segment is gone")
        except SegmentError as error:
            found = _ProvedSlots(0, 1, self._troubles.note_error("read", error))
        except OSError as error:
            found = _ProvedSlots(0, 0, self._troubles.note_error("read", error))
        if found.error is not None:
            self._forget(reader, piece.load.effect.locations[piece.begin].segment)
        return found

    def _read(self, reader: _PieceReader, load: _Load, begin: int, end: int) -> _ProvedSlots:
        """Read locations begin .. end-1, which are adjacent, into the buffer, and verify them."""
        first, count = load.effect.locations[begin].disk_slot, end - begin
        segment = self._open(reader, load.effect.locations[begin].segment)
        if not 0 <= first <= first + count <= segment.num_slots:
            return _ProvedSlots(0, 0, "there is no such slot")
        records = segment.table(first, count)
        segment.read_blocks(first, reader.buffer[:count])
        return self._verify(reader, segment, first, records, load.names[begin:end])

    def _verify(
        self, reader: _PieceReader, segment: Segment, first: int, records: Words, names: list[bytes]
    ) -> _ProvedSlots:
        is_good = segment.is_good(records, first)
        for index, name in enumerate(names):
            slot, record = first + index, records[index]
            if not is_good[index]:
                # The record may have been read in the middle of a write.
                again = segment.table(slot, 1)
                if not again.any() or segment.is_good(again, slot)[0]:
                    return _ProvedSlots(index, 0, "its slot was freed or used again")
                return _ProvedSlots(
                    index, 1, self._damaged(segment, slot, record, "its record is damaged")
                )
            if record[NAME].tobytes() != name:
                return _ProvedSlots(index, 0, "its slot was freed or used again")
            if sum_of(reader.buffer[index, : segment.block_bytes]) != record[SUM].tobytes():
                if not np.array_equal(segment.table(slot, 1)[0], record):
                    return _ProvedSlots(index, 0, "its slot was freed or used again")
                return _ProvedSlots(
                    index, 1, self._damaged(segment, slot, record, "its bytes are damaged")
                )
        return _ProvedSlots(len(names))

    def _damaged(self, segment: Segment, slot: int, record: Words, what: str) -> str:
        """Mark a disk slot as damaged, so that it is not read again. Return `what`."""
        text = f"slot {slot} of {segment.path.name}: {what}"
        self._troubles.note("damaged", f"{text}; the block is computed again and then rewritten")
        try:
            segment.mark_damaged(slot, int(record[SEQUENCE]))
        except OSError as error:
            self._troubles.note_error("mark", error)
        return what

    def _open(self, reader: _PieceReader, number: int) -> Segment:
        """Return a segment, which stays open, so that its file is looked up once. Close segments
        that were removed, so that their space on disk becomes free.
        """
        known = reader.segments.get(number)
        if known is not None and known.is_whole():
            reader.segments.move_to_end(number)
            return known
        for other, open_one in [*reader.segments.items()]:
            if not open_one.is_whole():
                self._forget(reader, other)
        segment = Segment.open(self._folder, number)
        try:
            segment.require(self._fingerprint, self._blocks.shape[1])
        except SegmentError:
            segment.close()
            raise
        reader.segments[number] = segment
        if len(reader.segments) > _MAX_OPEN:
            reader.segments.popitem(last=False)[1].close()
        return segment

    def _forget(self, reader: _PieceReader, number: int) -> None:
        segment = reader.segments.pop(number, None)
        if segment is not None:
            segment.close()

    def _end(self, load: _Load, error: str | None = None) -> None:
        """Answer a load, once. Under the lock."""
        if load.is_over:
            return
        load.is_over = True
        self._loads.remove(load)
        found = load.outcome()
        answer = BlocksRead(
            load.effect.read_id, found.num_good, found.num_damaged, found.error or error
        )
        self._worker.put(answer)


def _pieces(effect: ReadBlocks, most: int) -> list[tuple[int, int]]:
    """Cut the locations into pieces of at most `most` adjacent slots. Return each (begin, end)."""
    return [
        (begin, min(begin + most, at + count))
        for at, count in runs(
            [number_of(location.segment, location.disk_slot) for location in effect.locations]
        )
        for begin in range(at, at + count, most)
    ]

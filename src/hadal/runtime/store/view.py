"""View of the blocks on disk, from all writers: reads the folder periodically, and reports added
and removed blocks to a leader.

Each scan reads the change words of every segment of this model, and the tables of changed segments.
Uses that a leader reports are counted in the segments, where their writers read them. While the
folder cannot be read, its blocks count as removed. The leader never waits for any of this.

Decides nothing, and reads no block.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hadal.core.cache import DiskLocation
from hadal.core.seams import DiskNews
from hadal.runtime.process.process import Run
from hadal.runtime.store.segments import (
    NAME,
    SEQUENCE,
    OtherModelError,
    Segment,
    SegmentError,
    Words,
    segment_numbers,
    segment_path,
)
from hadal.runtime.store.troubles import Troubles
from hadal.runtime.worker import lower_priority

LOOK_S = 0.2
NEWS_BLOCKS = 16384
"""Maximum number of blocks in one DiskNews: a leader processes that number within some milliseconds."""
FOLDER_S = 60.0
"""Seconds after the start in which a missing folder is normal: writers create it once they run."""
MARKS_MAX = 4096
"""Maximum number of queued calls of `mark`. Further ones are dropped: uses are statistics."""

_Names = NDArray[np.void]
_NAME = np.dtype("V16")


@dataclass
class _Known:
    """A segment as last reported."""

    segment: Segment
    names: _Names
    """Name of the block in each slot."""
    is_there: NDArray[np.bool_]
    """True for each slot that holds a block."""
    changes: tuple[int, int] | None = None


class _KnownSegments:
    """Segments of one model in one folder, as last reported. For one thread."""

    def __init__(self, folder: Path, fingerprint: str, troubles: Troubles) -> None:
        self.by_number: dict[int, _Known] = {}
        self._folder = folder
        self._fingerprint = fingerprint
        self._troubles = troubles
        self._number_to_stat: dict[int, tuple[int, int]] = {}
        """Segment -> its size and time of change when it was opened. A damaged segment is tried
        again when these differ.
        """
        self._foreign: set[int] = set()
        """Segments of other models."""
        self._missed_from_s = time.monotonic() + FOLDER_S

    def numbers(self) -> list[int]:
        """Return the numbers of the segments in the folder; none if it cannot be read."""
        try:
            numbers = segment_numbers(self._folder)
            self._missed_from_s = 0.0
            return numbers
        except FileNotFoundError:
            if time.monotonic() < self._missed_from_s:
                return []
            self._troubles.note_gone()
        except OSError as error:
            self._troubles.note_error("read the folder", error)
        return []

    def open(self, number: int) -> _Known | None:
        """Open a segment; None if it is gone, damaged, unreadable or another model's."""
        if number in self._foreign:
            return None
        try:
            found = segment_path(self._folder, number).stat()
            stat = found.st_size, found.st_mtime_ns
            if self._number_to_stat.get(number) == stat:
                return None
            self._number_to_stat[number] = stat
            segment = Segment.open(self._folder, number)
        except FileNotFoundError:
            return None  # Removed after the folder was read.
        except SegmentError as error:
            self._troubles.note_useless(error)
            return None
        except OSError as error:
            # The next scan may succeed even if the file does not change.
            self._number_to_stat.pop(number, None)
            self._troubles.note_error("open", error)
            return None
        try:
            segment.require(self._fingerprint)
        except OtherModelError:
            self._foreign.add(number)
            segment.close()
            return None
        known = _Known(
            segment, np.zeros(segment.num_slots, _NAME), np.zeros(segment.num_slots, np.bool_)
        )
        self.by_number[number] = known
        return known

    def lose(self, number: int) -> _Names:
        """Close a segment that is gone or damaged, and return the names of its blocks."""
        known = self.by_number.pop(number)
        self._number_to_stat.pop(number, None)
        known.segment.close()
        return known.names[known.is_there]


class DiskView:
    """View of one folder, for one leader. take, mark and stop are called from the host's thread."""

    def __init__(
        self, folder: Path, fingerprint: str, wake: Callable[[], None], look_s: float = LOOK_S
    ) -> None:
        self.troubles = Troubles(folder)
        self._known = _KnownSegments(folder, fingerprint, self.troubles)
        self._wake = wake
        self._look_s = look_s
        self._lock = threading.Lock()
        self._news: list[DiskNews] = []
        self._broken: BaseException | None = None
        self._marks: queue.Queue[tuple[DiskLocation, ...]] = queue.Queue(MARKS_MAX)
        self._has_reported = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-view", daemon=True)
        self._thread.start()

    @property
    def num_blocks(self) -> int:
        """Number of blocks on disk; a name in two segments counts twice."""
        return sum(int(known.is_there.sum()) for known in list(self._known.by_number.values()))

    def take(self) -> list[DiskNews]:
        """Return the changes since the last call. The first report comes soon after the start, even
        if there are no blocks. Raises the exception of the thread, if any.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            news, self._news = self._news, []
        return news

    def mark(self, locations: tuple[DiskLocation, ...]) -> None:
        """Count uses of these blocks: later, or not at all if too many marks are queued."""
        try:
            self._marks.put_nowait(locations)
        except queue.Full:
            self.troubles.note(
                "marks", "the folder is too slow: some uses of blocks are not counted"
            )

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        self._thread.join(timeout_s)

    # ---- in the thread ----
    def _run(self) -> None:
        lower_priority()
        try:
            while not self._stopping.is_set():
                begun_s = time.monotonic()
                self._look()
                self._write_marks()
                self._stopping.wait(
                    max(self._look_s - (time.monotonic() - begun_s), self._look_s / 4)
                )
            for known in self._known.by_number.values():
                known.segment.close()
        except BaseException as error:
            with self._lock:
                self._broken = error
            self._wake()

    def _look(self) -> None:
        added: list[tuple[int, NDArray[np.int64], _Names]] = []
        dropped: list[_Names] = []
        numbers = self._known.numbers()
        for number in self._known.by_number.keys() - set(numbers):
            dropped.append(self._known.lose(number))
        for number in numbers:
            known = self._known.by_number.get(number) or self._known.open(number)
            if known is None:
                continue
            try:
                slots, gone = self._changes(known)
            except (OSError, SegmentError) as error:
                self.troubles.note_error("read the index of", error)
                dropped.append(self._known.lose(number))
                continue
            if len(slots):
                added.append((number, slots, known.names[slots]))
            dropped.append(gone)
        self._tell(added, np.concatenate(dropped) if dropped else np.empty(0, _NAME))

    def _changes(self, known: _Known) -> tuple[NDArray[np.int64], _Names]:
        """Return the slots that hold another block than before, and the names of removed blocks."""
        nothing = np.empty(0, np.int64), np.empty(0, _NAME)
        segment = known.segment
        if not segment.is_whole():
            raise SegmentError(f"{segment.path.name} was removed or cut off")
        changes = segment.changes()
        if changes == known.changes:
            return nothing
        records = segment.table()
        is_good, names = segment.is_good(records), _names(records)
        num_bad = int((records.any(axis=1) & ~is_good).sum())
        is_there = is_good & (segment.damaged() != records[:, SEQUENCE])
        if num_bad:
            # Damaged, or being written now: its writer reports a change when it is done.
            self.troubles.note(
                "records", f"{segment.path.name}: {num_bad} records are incomplete or damaged"
            )
        is_other = names != known.names
        gone = known.names[known.is_there & (~is_there | is_other)]
        (slots,) = np.nonzero(is_there & (~known.is_there | is_other))
        known.names, known.is_there, known.changes = names, is_there, changes
        return slots, gone

    def _tell(self, added: list[tuple[int, NDArray[np.int64], _Names]], gone: _Names) -> None:
        if len(gone):
            lost = set(gone.tolist())
            # Another segment, or another slot, may hold the same block.
            for number, known in self._known.by_number.items():
                slots = np.nonzero(known.is_there & np.isin(_first(known.names), _first(gone)))[0]
                kept = np.array([name.tobytes() in lost for name in known.names[slots]], np.bool_)
                lost -= set(known.names[slots[kept]].tolist()) if len(kept) else set()
                if kept.any():
                    added.append((number, slots[kept], known.names[slots[kept]]))
            dropped = b"".join(lost)
        else:
            dropped = b""
        news = list(_news(added, dropped))
        if not news and self._has_reported:
            return
        self._has_reported = True
        with self._lock:
            self._news += news or [DiskNews(b"", ())]
        self._wake()

    def _write_marks(self) -> None:
        number_to_slots: dict[int, list[int]] = {}
        while True:
            try:
                locations = self._marks.get_nowait()
            except queue.Empty:
                break
            for location in locations:
                number_to_slots.setdefault(location.segment, []).append(location.disk_slot)
        for number, slots in number_to_slots.items():
            known = self._known.by_number.get(number)
            if known is None:
                continue
            try:
                known.segment.mark_used(
                    np.array([slot for slot in slots if slot < known.segment.num_slots], np.int64)
                )
            except (OSError, SegmentError) as error:
                self.troubles.note_error("count uses in", error)


def make_view(run: Run, wake: Callable[[], None]) -> DiskView | None:
    """Make a leader's view of the disk cache; None if the deployment has no disk cache."""
    folder = run.deployment.cache.folder
    return DiskView(Path(folder), run.fingerprint, wake) if folder else None


def _names(records: Words) -> _Names:
    return np.ascontiguousarray(records[:, NAME]).view(_NAME)[:, 0]


def _first(names: _Names) -> Words:
    """Return the first 8 bytes of each name, as uint64."""
    return np.ascontiguousarray(names).view("<u8")[::2]


def _news(
    added: Iterable[tuple[int, NDArray[np.int64], _Names]], dropped: bytes
) -> Iterable[DiskNews]:
    """Yield the removed blocks first, then the added ones."""
    for at in range(0, len(dropped), 16 * NEWS_BLOCKS):
        yield DiskNews(b"", (), dropped[at : at + 16 * NEWS_BLOCKS])
    for number, slots, names in added:
        for at in range(0, len(slots), NEWS_BLOCKS):
            piece = slice(at, at + NEWS_BLOCKS)
            locations = tuple(DiskLocation(number, slot) for slot in slots[piece].tolist())
            yield DiskNews(names[piece].tobytes(), locations)

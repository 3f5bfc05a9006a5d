"""Segments that one writer of the disk cache owns: adopted or created, never beyond its share.

Deletes unfinished files. Deletes dead writers' segments only of its own model, oldest first, only
while all segments of that model exceed the deployment's budget. Independent of the slots of blocks.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from hadal.runtime.process.private import take_from_others
from hadal.runtime.store.segments import (
    MAX_SEGMENT_SLOTS,
    NEW_SUFFIX,
    SUFFIX,
    OtherModelError,
    Segment,
    SegmentError,
    SegmentTakenError,
    remove_unfinished,
    segment_bytes,
    segment_numbers,
    segment_path,
    slot_bytes_of,
)
from hadal.runtime.store.troubles import Troubles

SEGMENT_BYTES = 256 * 1024 * 1024
"""Size of a new segment, if that cuts the share into a number of segments within PARTS. Small
enough that siblings can share a dead writer's segments; large enough that there are few, because
every leader holds all of them open.
"""
PARTS = 8, 64
"""Minimum and maximum number of segments that a share is cut into."""
ORPHAN_S = 60.0
"""Time for which a dead writer's segments are reserved for its successor."""


class OwnSegments:
    """Segments of this writer, used by its thread. Methods raise OSError if the folder fails."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        block_bytes: int,
        share_bytes: int,
        total_bytes: int,
        troubles: Troubles,
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._share_bytes = share_bytes
        self._total_bytes = total_bytes
        self._troubles = troubles
        self._orphan_to_seen_s: dict[int, float] = {}
        self._foreign: set[int] = set()
        """Segments that are damaged, cut off, forbidden or another model's: tried only once."""
        self.segments: dict[int, Segment] = {}
        """Number -> segment."""

    @property
    def num_bytes(self) -> int:
        return sum(segment.total_bytes for segment in self.segments.values())

    def enter(self) -> list[Segment]:
        """Create the folder if missing; adopt dead writers' newest segments, up to the share."""
        self.make_folder()
        # A folder with other files, such as a home, keeps its mode: segments themselves are 0600.
        if all(path.suffix in (SUFFIX, NEW_SUFFIX) for path in self._folder.iterdir()):
            # Another user's folder: the start has reported that (runtime/cache_folder).
            with contextlib.suppress(PermissionError):
                take_from_others(self._folder)
        remove_unfinished(self._folder)
        return self.adopt()

    def make_folder(self) -> bool:
        """Create the folder if it is missing or was deleted. Return True if it was missing."""
        if self._folder.is_dir():
            return False
        # For its owner alone, like the segments: complete KV reveals its prompts.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return True

    def adopt(self, most: int | None = None) -> list[Segment]:
        """Lock and return at most `most` dead writers' segments, as far as the share allows."""
        adopted: list[Segment] = []
        for number in self._others(newest_first=True):
            if len(adopted) == most or self._share_bytes - self.num_bytes < segment_bytes(
                1, self._block_bytes
            ):
                break
            segment = self._adopt(number)
            if segment is None:
                continue
            if self.num_bytes + segment.total_bytes > self._share_bytes:
                segment.close()
                continue
            self.segments[number] = segment
            adopted.append(segment)
        return adopted

    def create(self) -> Segment | None:
        """Create an empty segment, of usual size or what the share has left; None if nothing is."""
        left_bytes = self._share_bytes - self.num_bytes
        slot_bytes = slot_bytes_of(self._block_bytes)
        # A share beyond the disk's size would make each segment too large, despite free space.
        share_bytes = min(self._share_bytes, _disk_bytes(self._folder) or self._share_bytes)
        wanted_bytes = max(min(SEGMENT_BYTES, share_bytes // PARTS[0]), share_bytes // PARTS[1])
        num_slots = min(MAX_SEGMENT_SLOTS, max(1, wanted_bytes // slot_bytes))
        while num_slots and segment_bytes(num_slots, self._block_bytes) > left_bytes:
            num_slots = min(num_slots - 1, max(0, left_bytes // slot_bytes))
        if not num_slots:
            return None
        segment = Segment.create(self._folder, self._fingerprint, self._block_bytes, num_slots)
        self.segments[segment.number] = segment
        return segment

    def lose(self, number: int) -> None:
        """Close a segment that is gone or does not work."""
        self.segments.pop(number).close()

    def refuse(self, number: int) -> None:
        """Close a segment that cannot be read, and do not adopt it again."""
        self._foreign.add(number)
        self.lose(number)

    def sweep(self) -> None:
        """Delete dead writers' segments after ORPHAN_S, while this model's exceed the budget."""
        now_s = time.monotonic()
        sizes: dict[int, int] = {}
        for number in self._others(newest_first=False):
            try:
                segment = Segment.open(self._folder, number)
            except (OSError, SegmentError):
                continue  # Removed meanwhile, or not readable: its model is unknown.
            if (segment.fingerprint, segment.block_bytes) == (self._fingerprint, self._block_bytes):
                sizes[number] = segment.total_bytes
            segment.close()
        excess_bytes = self.num_bytes + sum(sizes.values()) - self._total_bytes
        orphans: dict[int, float] = {}
        for number, size in sizes.items():
            if excess_bytes <= 0 or (orphan := self._adopt(number)) is None:
                continue
            orphans[number] = self._orphan_to_seen_s.get(number, now_s)
            if now_s - orphans[number] >= ORPHAN_S:
                orphan.unlink()
                excess_bytes -= size
            orphan.close()
        self._orphan_to_seen_s = orphans

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()

    def _others(self, *, newest_first: bool) -> list[int]:
        """Return the numbers of segments that this writer does not own, by their last change."""
        found: list[tuple[float, int]] = []
        for number in segment_numbers(self._folder):
            if number in self.segments or number in self._foreign:
                continue
            try:
                found.append((segment_path(self._folder, number).stat().st_mtime, number))
            except FileNotFoundError:
                continue  # Removed after the folder was read.
        return [number for _, number in sorted(found, reverse=newest_first)]

    def _adopt(self, number: int) -> Segment | None:
        """Lock a segment and return it if it is a dead writer's, whole, and of this model."""
        try:
            segment = Segment.adopt(self._folder, number)
        except (SegmentTakenError, FileNotFoundError):
            return None
        except SegmentError as error:
            self._foreign.add(number)
            self._troubles.note_useless(error)
            return None
        except OSError as error:  # One unusable segment must not stop the adoption of others.
            if isinstance(error, PermissionError):
                self._foreign.add(number)
            self._troubles.note_error("adopt", error)
            return None
        try:
            segment.require(self._fingerprint, self._block_bytes)
        except OtherModelError as error:
            self._foreign.add(number)
            self._troubles.note(
                "another model",
                f"{error}; it is not deleted, and this model's budget does not include it",
            )
            segment.close()
            return None
        return segment


def _disk_bytes(folder: Path) -> int:
    """Return the size of the whole file system; 0 if it reports none. Raises OSError."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize

"""The segments one writer of the disk cache owns: adopted from the dead or made, never beyond its
share.

Deletes nothing but dead writers' segments of its own model, and those only while all of that
model's together exceed the deployment's budget; then oldest first. Knows nothing of which block
lies where.
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
"""Size of a new segment, if the share is cut into PARTS by that: small enough that siblings can
share what a dead writer left, large enough that there are few, for every leader holds all of them
open.
"""
PARTS = 8, 64
"""A share is cut into so many segments at least, at most."""
ORPHAN_S = 60.0
"""Time for which a dead writer's segments are left to its successor."""


class OwnSegments:
    """The segments that this writer owns. Called from the writer's thread alone. Methods raise
    OSError where the folder fails.
    """

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
        """Segments that are damaged, cut off or another model's: looked at once."""
        self.segments: dict[int, Segment] = {}
        """Number -> segment."""

    @property
    def num_bytes(self) -> int:
        return sum(segment.total_bytes for segment in self.segments.values())

    def enter(self) -> list[Segment]:
        """Make the folder if need be, and adopt what the dead left, the newest first, up to the
        share.
        """
        self.make_folder()
        # A folder with other things in it, a home perhaps, is let be: segments are 0600 wherever
        # they lie.
        if all(path.suffix in (SUFFIX, NEW_SUFFIX) for path in self._folder.iterdir()):
            with contextlib.suppress(
                PermissionError
            ):  # Another user's, which the start has said (runtime/cache_folder).
                take_from_others(self._folder)
        remove_unfinished(self._folder)
        return self.adopt()

    def make_folder(self) -> bool:
        """Make the folder where it is not, at first or because somebody deleted it; True if it was
        not there.
        """
        if self._folder.is_dir():
            return False
        # As the segments, for their owner alone: in whole, KV tells the prompts it is of.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return True

    def adopt(self, most: int | None = None) -> list[Segment]:
        """Lock dead writers' segments as far as the share allows, `most` of them at most. Returns
        the new ones.
        """
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
        """Make an empty segment, as large as the share still allows; None if it allows none."""
        left_bytes = self._share_bytes - self.num_bytes
        slot_bytes = slot_bytes_of(self._block_bytes)
        # Of a share that is more than the disk, parts could be too: then there would be room and
        # nothing kept.
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
        """Let go of a segment that is gone or does not work."""
        self.segments.pop(number).close()

    def refuse(self, number: int) -> None:
        """Let go of a segment that cannot be read, for good."""
        self._foreign.add(number)
        self.lose(number)

    def sweep(self) -> None:
        """Delete what the dead left and nobody took up, while there is more of this model than the
        budget.
        """
        now_s = time.monotonic()
        sizes: dict[int, int] = {}
        for number in self._others(newest_first=False):
            try:
                segment = Segment.open(self._folder, number)
            except (OSError, SegmentError):
                continue  # Removed since, or nothing that could be deleted for this model's sake.
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
        """Numbers of segments that are not this writer's, by their last change."""
        found: list[tuple[float, int]] = []
        for number in segment_numbers(self._folder):
            if number in self.segments or number in self._foreign:
                continue
            try:
                found.append((segment_path(self._folder, number).stat().st_mtime, number))
            except FileNotFoundError:
                continue  # Removed since the folder was read.
        return [number for _, number in sorted(found, reverse=newest_first)]

    def _adopt(self, number: int) -> Segment | None:
        """Lock it if it is a dead writer's, whole, and of this model."""
        try:
            segment = Segment.adopt(self._folder, number)
        except (SegmentTakenError, FileNotFoundError):
            return None
        except SegmentError as error:
            self._foreign.add(number)
            self._troubles.note_useless(error)
            return None
        except OSError as error:  # One that cannot be had is no reason to do without the others.
            if isinstance(error, PermissionError):
                self._foreign.add(number)
            self._troubles.note_error("adopt", error)
            return None
        try:
            segment.require(self._fingerprint, self._block_bytes)
        except OtherModelError as error:
            self._foreign.add(number)
            self._troubles.note(
                "another model", f"{error}; it stays, beside this model's and its budget"
            )
            segment.close()
            return None
        return segment


def _disk_bytes(folder: Path) -> int:
    """Size of the file system, with what others have of it; 0 where it does not say. Raises
    OSError.
    """
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize

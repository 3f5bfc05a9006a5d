"""Test which segments a writer adopts from dead writers if some files are damaged, unreadable or no
segments.
"""

import errno
from pathlib import Path
from typing import Any

import pytest

from hadal.core.cache import split
from hadal.runtime.store import own, owned_segments
from hadal.runtime.store.segments import PAGE, Segment, segment_bytes, segment_numbers, segment_path
from hadal.runtime.store.view import DiskView
from tests.unit.runtime.disks import BLOCK_BYTES, host, new_names
from tests.waiting import DEADLINE_S, wait_until


def damage(path: Path, slot: int, what: str = "data") -> None:
    """Change the first byte of a block, or of its record."""
    one = Segment.open(path.parent, int(path.stem, 16))
    offset = (
        one.total_bytes - (one.num_slots - slot) * one.slot_bytes
        if what == "data"
        else PAGE + 64 * slot
    )
    one.close()
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("what", ["seg", "new"])
def test_what_is_no_segment_keeps_nobody_from_the_others(tmp_path: Path, what: str) -> None:
    (tmp_path / f"{7:016x}.{what}").mkdir()
    with host(tmp_path) as one:
        assert None not in one.save(new_names(10), tuple(range(1, 11))).locations


def test_a_dead_writers_segment_that_cannot_be_read_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_segments, "PARTS", (4, 64))
    names = new_names(60)
    share_bytes = 4 * segment_bytes(20, BLOCK_BYTES)
    with host(tmp_path, share_bytes=share_bytes) as one:
        locations = one.save(names, tuple(range(1, 61))).locations
        assert None not in locations
    numbers = segment_numbers(tmp_path)
    assert len(numbers) == 3
    table = Segment.table

    def fail(self: Segment, first: int = 0, count: int | None = None) -> Any:
        if self.number == numbers[1] and self.is_owner:
            raise OSError(errno.EIO, "the disk cannot read this one")
        return table(self, first, count)

    monkeypatch.setattr(Segment, "table", fail)
    with host(tmp_path, share_bytes=share_bytes) as one:
        assert None not in one.save(new_names(1), (1,)).locations
        kept = [
            name
            for name, location in zip(split(names), locations, strict=True)
            if location is not None and location.segment != numbers[1]
        ]
        again = one.save(b"".join(kept), tuple(range(1, len(kept) + 1)))
        assert set(again.locations) <= set(
            locations
        )  # The blocks were found in place, and not written again.


def test_a_slot_that_was_damaged_is_believed_again_after_a_restart(tmp_path: Path) -> None:
    names = new_names(3)
    with host(tmp_path) as one:
        locations = one.save(names, (1, 2, 3)).locations
        assert locations[2] is not None
        damage(segment_path(tmp_path, locations[2].segment), locations[2].disk_slot)
        assert one.load(names, locations, (21, 22, 23)).num_damaged == 1
    with host(tmp_path) as one:
        other = new_names(1)
        (location,) = one.save(other, (4,)).locations
        assert location is not None
    with host(tmp_path) as one:
        assert one.save(other, (4,)).locations == (
            location,
        )  # The block was reported as durable, so it must be there.
    view = DiskView(tmp_path, "model", lambda: None)
    try:
        added = b"".join(news.added for news in wait_until(view.take, "the view has looked"))
        assert other in list(split(added))
    finally:
        view.stop(DEADLINE_S)


def test_a_block_that_was_written_anew_outlives_what_is_said_of_its_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "POLL_S", 0.0)
    names = list(split(new_names(4)))
    with host(tmp_path) as one:
        locations = one.save(b"".join(names[:3]), (1, 2, 3)).locations
        assert locations[0] is not None
        path = segment_path(tmp_path, locations[0].segment)
        damage(path, 0)
        assert one.load(names[0], locations[:1], (21,)).num_damaged == 1
        two = names[0] + names[3]
        anew = one.save(two, (1, 4)).locations
        assert locations[0] not in anew  # Two adjacent slots elsewhere are used.
        damage(path, 2)
        assert one.load(names[2], locations[2:], (21,)).num_damaged == 1
        one.save(new_names(3), (1, 2, 3))  # The writer checks the damaged slots.
        assert one.save(two, (1, 4)).locations == anew


@pytest.mark.parametrize("what", ["data", "record"])
def test_what_a_reader_found_damaged_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(own, "POLL_S", 0.0)
    names = new_names(3)
    with host(tmp_path) as one:
        locations = one.save(names, (1, 2, 3)).locations
        assert locations[1] is not None
        damage(segment_path(tmp_path, locations[1].segment), 1, what)
        assert one.load(names, locations, (21, 22, 23)).num_damaged == 1
        anew = one.save(names, (1, 2, 3)).locations
        assert one.load(names, anew, (21, 22, 23)).num_loaded == 3


def test_what_a_dead_sibling_left_is_found_at_the_moment_its_segment_is_taken_up(
    tmp_path: Path,
) -> None:
    names, ten = new_names(10), tuple(range(1, 11))
    with host(tmp_path) as one:
        assert one.save(new_names(0), ()).error is None  # No segment to adopt yet.
        with host(tmp_path) as sibling:
            locations = sibling.save(names, ten).locations
        assert one.save(names, ten).locations == locations
        assert one.load(names, locations, tuple(range(21, 31))).num_loaded == 10

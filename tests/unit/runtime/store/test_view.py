"""Test a leader's view of the folder: blocks added and removed by any writer, and uses reported
back to the writers.
"""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hadal.core.cache import NAME_BYTES, DiskLocation, split
from hadal.core.seams import DiskNews
from hadal.runtime.store import view
from hadal.runtime.store.segments import PAGE, Segment, segment_bytes, segment_numbers, segment_path
from hadal.runtime.store.view import DiskView
from tests.unit.runtime.disks import BLOCK_BYTES, host, new_names
from tests.waiting import DEADLINE_S, wait_until


class Leader:
    """Blocks that a leader knows from the news it received."""

    def __init__(self, folder: Path, fingerprint: str = "model") -> None:
        self.view = DiskView(folder, fingerprint, lambda: None, look_s=0.01)
        self.name_to_location: dict[bytes, DiskLocation] = {}
        self.news: list[DiskNews] = []

    def look(self) -> dict[bytes, DiskLocation]:
        for news in self.view.take():
            self.news.append(news)
            for name in split(news.dropped):
                self.name_to_location.pop(name, None)
            self.name_to_location.update(zip(split(news.added), news.locations, strict=True))
        return self.name_to_location

    def sees(self, *names: bytes) -> None:
        """Wait until the leader has these names and no others."""
        wait_until(lambda: self.look().keys() == set(names), "these are known, and no others")


@contextmanager
def leader(folder: Path, fingerprint: str = "model") -> Iterator[Leader]:
    one = Leader(folder, fingerprint)
    try:
        yield one
    finally:
        one.view.stop(DEADLINE_S)


def test_the_first_news_says_all_there_is_even_if_it_is_nothing(tmp_path: Path) -> None:
    with leader(tmp_path) as empty:
        (news,) = wait_until(empty.view.take, "the view has looked")
        assert news == DiskNews(b"", ())
    names = new_names(10)
    with host(tmp_path) as one:
        locations = one.save(names, tuple(range(1, 11))).locations
        with leader(tmp_path) as full:
            (news,) = wait_until(full.view.take, "the view has looked")
            told = dict(zip(split(news.added), news.locations, strict=True))
            assert told == dict(zip(split(names), locations, strict=True))
    with leader(tmp_path) as later:  # The writer is gone.
        (news,) = wait_until(later.view.take, "the view has looked")
        assert len(news.locations) == 10
        assert later.view.num_blocks == 10


def test_news_wake_whoever_takes_them(tmp_path: Path) -> None:
    woken = threading.Event()
    own = DiskView(tmp_path, "model", woken.set, look_s=0.01)
    try:
        assert woken.wait(DEADLINE_S)
        assert own.take()
        woken.clear()
        with host(tmp_path) as one:
            one.save(new_names(1), (1,))
            assert woken.wait(DEADLINE_S)
    finally:
        own.stop(DEADLINE_S)


@pytest.mark.promise(
    "watch the folder and get every writer's changes as DiskNews, so units and whole "
    "deployments may share one folder."
)
def test_every_writers_blocks_come_and_go(tmp_path: Path) -> None:
    with host(tmp_path) as one, host(tmp_path) as two, leader(tmp_path) as own:
        first, second = new_names(2), new_names(2)
        one.save(first, (1, 2))
        own.sees(*split(first))
        locations = two.save(second, (1, 2)).locations
        own.sees(*split(first), *split(second))
        assert own.name_to_location[second[:16]] == locations[0]


def test_what_made_room_is_dropped(tmp_path: Path) -> None:
    with host(tmp_path, share_bytes=segment_bytes(8, BLOCK_BYTES)) as one, leader(tmp_path) as own:
        alive: set[bytes] = set()
        for _ in range(20):
            names = new_names(2)
            stored = one.save(names, (1, 2))
            alive = alive - set(split(stored.dropped)) | set(split(names))
        own.sees(*alive)
        for name, location in own.name_to_location.items():
            assert one.load(name, (location,), (40,)).num_loaded == 1


def test_a_block_that_two_wrote_stays_while_one_has_it(tmp_path: Path) -> None:
    names = new_names(3)
    with leader(tmp_path) as own:
        with host(tmp_path) as one, host(tmp_path) as two:
            location = one.save(names, (1, 2, 3)).locations[0]
            other = two.save(names, (1, 2, 3)).locations[0]
            own.sees(*split(names))
            wait_until(lambda: own.look() and own.view.num_blocks == 6, "both copies are known")
        assert location is not None
        assert other is not None
        known = own.name_to_location[names[:16]]
        segment_path(tmp_path, known.segment).unlink()
        left = location if known == other else other
        wait_until(lambda: own.look().get(names[:16]) == left, "the other copy is known")
        segment_path(tmp_path, left.segment).unlink()
        own.sees()


def test_many_blocks_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "NEWS_BLOCKS", 4)
    names = new_names(10)
    with host(tmp_path) as one:
        one.save(names, tuple(range(1, 11)))
    with leader(tmp_path) as own:
        own.sees(*split(names))
        assert [len(news.locations) for news in own.news] == [4, 4, 2]


def test_uses_reach_the_segments(tmp_path: Path) -> None:
    with host(tmp_path) as one, leader(tmp_path) as own:
        names = new_names(3)
        locations = one.save(names, (1, 2, 3)).locations
        own.sees(*split(names))
        assert locations[1] is not None
        known = (
            locations[1],
            locations[1],
            DiskLocation(12345, 0),
            DiskLocation(locations[1].segment, 10**6),
        )
        own.view.mark(known)
        segment = Segment.open(tmp_path, locations[1].segment)
        slot = locations[1].disk_slot
        wait_until(lambda: segment.uses()[slot] == 2, "the uses are written")
        assert segment.uses().sum() == 2


def test_a_block_found_damaged_by_a_reader_is_dropped_by_all(tmp_path: Path) -> None:
    with host(tmp_path) as one, host(tmp_path) as two, leader(tmp_path) as own:
        names = new_names(3)
        locations = one.save(names, (1, 2, 3)).locations
        own.sees(*split(names))
        assert locations[1] is not None
        segment = Segment.open(tmp_path, locations[1].segment)
        with segment.path.open("r+b") as file:
            file.seek(
                segment.total_bytes
                - (segment.num_slots - locations[1].disk_slot) * segment.slot_bytes
                + 9
            )
            file.write(b"\xff\x00\xff")
        assert two.load(names, locations, (40, 41, 42)).num_damaged == 1  # type: ignore[arg-type]
        own.sees(names[:16], names[32:])


@pytest.mark.parametrize("what", ["header", "record", "cut off", "empty", "removed", "junk"])
def test_a_damaged_segment_is_passed_over(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = new_names(3)
    with host(tmp_path) as one:
        locations = one.save(names, (1, 2, 3)).locations
    assert locations[0] is not None
    path = segment_path(tmp_path, locations[0].segment)
    if what in ("header", "record"):
        with path.open("r+b") as file:
            file.seek(20 if what == "header" else PAGE + 64 * locations[0].disk_slot + 3)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 16]))
    elif what == "removed":
        path.unlink()
    elif what == "junk":
        path.write_bytes(os.urandom(PAGE * 3))
    else:
        os.truncate(path, PAGE * 3 if what == "cut off" else 0)
    caplog.set_level(logging.WARNING, "hadal.disk")
    with leader(tmp_path) as own:
        own.sees(*(split(names[16:]) if what == "record" else ()))
        wait_until(lambda: own.news or own.look(), "the view has looked")
        if what != "removed":
            assert own.view.troubles.kind_to_count
            assert len(caplog.records) == 1
        with host(tmp_path) as other:  # A writer works beside the broken segment.
            other.save(names, (1, 2, 3))
            own.sees(*split(names))


def test_a_segment_that_could_not_be_opened_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = new_names(3)
    with host(tmp_path) as one:
        one.save(names, (1, 2, 3))
    opened, num_failures = Segment.open, 2

    def fail(folder: Path, number: int) -> Segment:
        nonlocal num_failures
        num_failures -= 1
        if num_failures >= 0:
            raise OSError(errno.EMFILE, "too many open files")
        return opened(folder, number)

    monkeypatch.setattr(Segment, "open", fail)
    with leader(tmp_path) as own:
        own.sees(*split(names))


def test_another_models_segments_are_passed_over(tmp_path: Path) -> None:
    with host(tmp_path, "fine-tune") as other, host(tmp_path) as one, leader(tmp_path) as own:
        theirs, ours = new_names(2), new_names(2)
        other.save(theirs, (1, 2))
        one.save(ours, (1, 2))
        own.sees(*split(ours))


def test_a_folder_that_is_not_there_or_goes_away_is_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hadal.disk")
    folder = tmp_path / "cache"
    with leader(folder) as own:
        assert wait_until(own.view.take, "the view has looked") == [DiskNews(b"", ())]
        assert not caplog.records, "nobody has made it yet"
        with host(folder) as one:
            names = new_names(2)
            one.save(names, (1, 2))
            own.sees(*split(names))
            shutil.rmtree(folder)
            own.sees()
        with host(folder) as one:
            one.save(names, (1, 2))
            own.sees(*split(names))
    assert len([record for record in caplog.records if "is gone" in record.message]) == 1


def test_a_folder_that_is_deleted_is_made_again_by_the_next_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hadal.disk")
    folder = tmp_path / "cache"
    with leader(folder) as own, host(folder) as one:
        names = new_names(2)
        one.save(names, (1, 2))
        own.sees(*split(names))
        shutil.rmtree(folder)
        own.sees()
        others = new_names(3)
        assert None not in one.save(others, (3, 4, 5)).locations
        assert folder.stat().st_mode & 0o777 == 0o700
        own.sees(*split(others))
    (record,) = caplog.records  # One line for both, the store and the view.
    assert f"the folder {folder} is gone" in record.message


def test_a_folder_that_nobody_makes_is_missed_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "hadal.disk")
    monkeypatch.setattr(view, "FOLDER_S", 0.05)
    with leader(tmp_path / "cache"):
        (record,) = wait_until(lambda: list(caplog.records), "it is said")
    assert "is gone" in record.message


def test_a_million_records_are_read_and_compared_in_little_time_and_memory(tmp_path: Path) -> None:
    """Not a timed test: it only has to end. 200,000 records are a table of 13 MB."""
    count = 200_000
    segment = Segment.create(tmp_path, "model", 8, count)
    names = np.random.default_rng(2).integers(0, 256, (count, NAME_BYTES), dtype=np.uint8).tobytes()
    records = segment.records(
        0, list(split(names)), [0] * count, [bytes(16)] * count, range(1, count + 1)
    )
    segment.write_records(0, records)
    with leader(tmp_path) as own:
        own.sees(*split(names))
        segment.clear(7, 3)
        segment.tell_change()
        own.sees(*split(names[: 7 * 16] + names[10 * 16 :]))
    assert segment_numbers(tmp_path) == [segment.number]

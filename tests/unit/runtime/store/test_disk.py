"""Test the store on a real disk that works, is full, read-only, gone, damaged or hangs: each read
is a verified block, or a miss.
"""

import logging
import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hadal.core.cache import DiskLocation, slice_of, split
from hadal.core.config import CacheConfig, Deployment, UnitsConfig
from hadal.core.messages.pools import StoreBlocks
from hadal.core.plans import BlocksStored
from hadal.runtime.process.process import Run
from hadal.runtime.store import owned_segments, writer
from hadal.runtime.store import segments as segments
from hadal.runtime.store.disk import make_store, share_of
from hadal.runtime.store.segments import PAGE, Segment, segment_bytes, segment_numbers, segment_path
from hadal.runtime.store.writer import WriteLimits
from tests.needs import leave_out
from tests.unit.runtime.disks import BLOCK_BYTES, Host, host, new_names
from tests.waiting import DEADLINE_S, wait_until

TEN = tuple(range(1, 11))
INTO = tuple(range(21, 31))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a real file system of 1 MiB; yield its folder."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, timeout=60
    )
    if made.returncode:
        leave_out("no small file system can be mounted here", "sudo make test")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=60)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def data_offset(path: Path, slot: int) -> int:
    one = Segment.open(path.parent, int(path.stem, 16))
    return one.total_bytes - (one.num_slots - slot) * one.slot_bytes


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files; a file that disappears meanwhile counts as empty."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_what_is_stored_comes_back_and_wakes_the_host(tmp_path: Path) -> None:
    with host(tmp_path) as one:
        names, before = new_names(10), one.pool.copy()
        one.begin_save(names, TEN)
        assert one.woken.wait(DEADLINE_S)
        stored = one.take()
        assert stored.error is None
        assert None not in stored.locations
        one.woken.clear()
        one.begin_load(names, stored.locations, INTO)
        assert one.woken.wait(DEADLINE_S)
        loaded = one.take()
        assert (loaded.num_loaded, loaded.num_damaged, loaded.error) == (10, 0, None)
        assert np.array_equal(one.pool[21:31], before[1:11])
        untouched = [block for block in range(64) if block not in INTO]
        assert np.array_equal(one.pool[untouched], before[untouched])
        assert one.load(b"", (), ()).num_loaded == 0


def test_neighbours_get_adjacent_slots(tmp_path: Path) -> None:
    with host(tmp_path) as one:
        locations = one.save(new_names(10), TEN).locations
        slots = [location.disk_slot for location in locations if location is not None]
        assert slots == list(range(slots[0], slots[0] + 10))


def test_a_successor_adopts_what_is_there_and_evicts_only_when_it_is_full(tmp_path: Path) -> None:
    names = new_names(10)
    with host(tmp_path) as one:
        locations, wanted = one.save(names, TEN).locations, one.pool[1:11].copy()
    with host(tmp_path) as two:
        assert two.load(names, locations, INTO).num_loaded == 10
        assert np.array_equal(two.pool[21:31], wanted)
        again = two.save(names + new_names(1), (*TEN, 11))
        assert again.locations[:10] == locations  # The ten blocks are not written again.
        assert again.dropped == b""


@pytest.mark.promise(
    "a server with that layer does not find a disk cache without it, nor the reverse"
)
def test_another_models_segments_are_neither_read_nor_adopted_nor_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = new_names(10)
    with host(tmp_path) as one:
        locations = one.save(names, TEN).locations
    before = set(segment_numbers(tmp_path))
    with host(tmp_path, "fine-tune") as other:
        loaded = other.load(names, locations, INTO)
        assert (loaded.num_loaded, loaded.num_damaged) == (0, 1)
        other.save(names, TEN)
        other.save(new_names(1), (1,))
    assert before < set(segment_numbers(tmp_path))
    assert sum("another model's" in one.message for one in caplog.records) <= 2


def test_eviction_tells_the_names_that_went_and_they_are_misses(tmp_path: Path) -> None:
    share = segment_bytes(8, BLOCK_BYTES)
    with host(tmp_path, share_bytes=share) as one:
        saved: dict[bytes, DiskLocation] = {}
        gone: dict[bytes, DiskLocation] = {}
        for _ in range(12):
            names = [new_names(1) for _ in range(3)]
            stored = one.save(b"".join(names), (1, 2, 3))
            for name in split(stored.dropped):
                gone[name] = saved.pop(name)
            saved.update(
                {
                    name: location
                    for name, location in zip(names, stored.locations, strict=True)
                    if location is not None
                }
            )
        assert gone
        assert bytes_in(tmp_path) <= share
        for name, location in gone.items():
            loaded = one.load(name, (location,), (40,))
            assert (loaded.num_loaded, loaded.num_damaged) == (0, 0)
        for name, location in saved.items():
            assert one.load(name, (location,), (40,)).num_loaded == 1


@pytest.mark.parametrize("what", ["data", "record"])
def test_a_flipped_bit_is_damage_and_is_not_looked_at_again(tmp_path: Path, what: str) -> None:
    with host(tmp_path) as one:
        names = new_names(10)
        locations = one.save(names, TEN).locations
        location = locations[4]
        assert location is not None
        path = segment_path(tmp_path, location.segment)
        flip(
            path,
            data_offset(path, location.disk_slot) + 77
            if what == "data"
            else PAGE + 64 * location.disk_slot + 20,
        )
        before = one.pool[25:31].copy()
        loaded = one.load(names, locations, INTO)
        assert (loaded.num_loaded, loaded.num_damaged) == (4, 1)
        assert loaded.error is not None
        assert np.array_equal(one.pool[21:25], one.pool[1:5])
        assert np.array_equal(one.pool[25:26], before[:1])  # The pool got no byte of it.
        assert one.store.troubles.kind_to_count["damaged"] == 1
    with host(tmp_path) as two:
        # The successor rejects the record too, and writes the block anew.
        two.pool[5] = one.pool[5]
        again = two.save(slice_of(names, 4, 5), (5,)).locations
        assert two.load(slice_of(names, 4, 5), again, (50,)).num_loaded == 1
        assert np.array_equal(two.pool[50], one.pool[5])


def test_a_truncated_segment_is_damage(tmp_path: Path) -> None:
    with host(tmp_path, limits=WriteLimits(pause_s=0.01)) as one:
        names = new_names(10)
        locations = one.save(names, TEN).locations
        path = segment_path(tmp_path, locations[0].segment if locations[0] else 0)
        os.truncate(path, data_offset(path, 5))
        loaded = one.load(names, locations, INTO)
        assert (loaded.num_loaded, loaded.num_damaged) == (0, 1)
        assert (
            one.save(new_names(1), (1,)).locations is not None
        )  # The store goes on, with another segment or with none.
        one.save_again(new_names(1), (1,))
    with host(tmp_path) as two:
        assert two.load(names, locations, INTO).num_loaded == 0


def test_a_wrong_place_is_a_miss(tmp_path: Path) -> None:
    with host(tmp_path) as one:
        names = new_names(2)
        locations = one.save(names, (1, 2)).locations
        assert locations[0] is not None
        loaded = one.load(names, locations[::-1], (40, 41))
        assert (loaded.num_loaded, loaded.num_damaged) == (0, 0)
        assert (
            one.load(names[:16], (DiskLocation(locations[0].segment, 10**6),), (40,)).num_loaded
            == 0
        )
        assert (
            one.load(names[:16], (DiskLocation(locations[0].segment ^ 1, 0),), (40,)).num_loaded
            == 0
        )


@pytest.mark.promise("a full, slow or failing disk costs cached blocks, but no time")
@pytest.mark.promise(
    "reads and writes get an error within their deadline, missing blocks are "
    "computed, and one line is logged for each cause"
)
def test_a_full_disk_refuses_and_is_told_once(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (full_disk / "other").write_bytes(b"x" * 1_000_000)
    caplog.set_level(logging.WARNING, "hadal.disk")
    with host(full_disk, share_bytes=4 << 20, limits=WriteLimits(pause_s=0.01)) as one:
        for _ in range(5):
            stored = one.save(new_names(10), TEN)
            assert stored.locations == (None,) * 10
            assert stored.error
        (full_disk / "other").unlink()
        assert one.load(new_names(1), (DiskLocation(1, 1),), (40,)).num_loaded == 0
    assert len([record for record in caplog.records if "No space" in record.message]) <= 2


def test_a_disk_without_room_to_grow_keeps_what_it_has(full_disk: Path) -> None:
    with host(full_disk, share_bytes=2 << 20, limits=WriteLimits(pause_s=0.01)) as one:
        kept = [one.save(new_names(10), TEN).locations for _ in range(12)]
        assert all(location is not None for locations in kept[:3] for location in locations)
        assert None not in kept[-1]  # Eviction made room.


@pytest.mark.parametrize("share_bytes", [1 << 30, 1 << 62])
def test_a_budget_beyond_the_disk_fills_the_disk(full_disk: Path, share_bytes: int) -> None:
    with host(full_disk, share_bytes=share_bytes, limits=WriteLimits(pause_s=0.01)) as one:
        assert None not in one.save(new_names(10), TEN).locations
        for _ in range(12):
            one.save(new_names(10), TEN)
    assert sum(path.stat().st_size for path in full_disk.iterdir()) > 2**19


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with host(tmp_path / "file", limits=WriteLimits(pause_s=0.01)) as one:
        stored = one.save(new_names(1), (1,))
        assert stored.locations == (None,)
        assert "file" in (stored.error or "")


def test_others_things_in_the_folder_do_no_harm_and_come_to_none(tmp_path: Path) -> None:
    theirs = [tmp_path / "draft.new", tmp_path / f"{1:016x}.seg", tmp_path / f"{2:016x}.seg"]
    theirs[0].write_text("somebody's")
    theirs[1].mkdir()
    theirs[2].symlink_to(theirs[0])
    with host(tmp_path, limits=WriteLimits(pause_s=0.01)) as one:
        assert None not in one.save(new_names(2), (1, 2)).locations
    assert all(path.exists() for path in theirs)


def test_a_segment_that_is_of_no_use_is_said_to_take_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with host(tmp_path) as one:
        one.save(new_names(2), (1, 2))
    for number in segment_numbers(tmp_path):
        os.truncate(segment_path(tmp_path, number), 100)
    with host(tmp_path) as one:
        assert None not in one.save(new_names(2), (1, 2)).locations
    (told,) = [record.message for record in caplog.records if "cut off" in record.message]
    assert "delete it" in told


@pytest.mark.promise("Only their owner can read them (0600, in a folder made 0700).")
def test_prompts_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with host(folder) as one:
        one.save(new_names(2), (1, 2))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_deleted_folder_is_a_miss_and_made_again_when_there_is_something_to_keep(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cache"
    with host(folder, limits=WriteLimits(pause_s=0.01)) as one:
        names = new_names(2)
        locations = one.save(names, (1, 2)).locations
        shutil.rmtree(folder)
        assert one.load(names, locations, (40, 41)).num_loaded == 0
        assert None not in one.save(names, (1, 2)).locations
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.promise("a full, slow or failing disk costs cached blocks, but no time")
def test_more_than_the_queue_holds_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    sync = Segment.sync
    monkeypatch.setattr(Segment, "sync", lambda self: (gate.wait(DEADLINE_S), sync(self))[1])
    with host(tmp_path, limits=WriteLimits(queue_bytes=12 * BLOCK_BYTES)) as one:
        first = one.begin_save(new_names(10), TEN)
        second = one.begin_save(new_names(10), TEN)
        refused = one.take()
        assert (refused.store_id, refused.locations) == (second, (None,) * 10)
        gate.set()
        done = one.take()
        assert (done.store_id, done.error) == (first, None)


@pytest.mark.promise(
    "reads and writes get an error within their deadline, missing blocks are "
    "computed, and one line is logged for each cause"
)
def test_a_load_that_hangs_is_answered_and_what_it_reads_late_goes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host(tmp_path, read_deadline_s=0.2) as one:
        names = new_names(2)
        locations: Any = one.save(names, (1, 2)).locations
        gate, before = threading.Event(), one.pool.copy()
        read = Segment.read_blocks

        def slow(self: Segment, first: int, into: segments.Bytes) -> None:
            gate.wait(DEADLINE_S)
            read(self, first, into)

        monkeypatch.setattr(Segment, "read_blocks", slow)
        loaded = one.load(names, locations, (40, 41))
        assert loaded.num_loaded == 0
        assert "not answered" in (loaded.error or "")
        for _ in range(8):  # In the end all threads hang; then reads fail without waiting.
            assert one.load(names, locations, (40, 41)).num_loaded == 0
        assert "hangs" in (one.load(names, locations, (40, 41)).error or "")
        gate.set()
        wait_until(lambda: one.load(names, locations, (42, 43)).num_loaded == 2, "it reads again")
        assert np.array_equal(one.pool[40:42], before[40:42])
        assert np.array_equal(one.pool[42:44], before[1:3])


@pytest.mark.promise(
    "reads and writes get an error within their deadline, missing blocks are "
    "computed, and one line is logged for each cause"
)
def test_a_store_that_hangs_is_answered_and_lets_go_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host(tmp_path, limits=WriteLimits(deadline_s=0.2)) as one:
        gate, write = threading.Event(), Segment.write_blocks

        def slow(self: Segment, first: int, blocks: segments.Bytes) -> None:
            gate.wait(DEADLINE_S)
            write(self, first, blocks)

        monkeypatch.setattr(Segment, "write_blocks", slow)
        names, wanted = new_names(1), one.pool[1].copy()
        stored = one.save(names, (1,))
        assert (stored.locations, stored.error) == ((None,), "the disk hangs")
        one.pool[1] = 0  # Another request owns the block now.
        gate.set()
        location = one.save_again(names, (1,))
        assert one.load(names, location, (40,)).num_loaded == 1
        assert np.array_equal(one.pool[40], wanted)


@pytest.mark.promise(
    "watch the folder and get every writer's changes as DiskNews, so units and whole "
    "deployments may share one folder."
)
def test_two_writers_in_one_folder_keep_apart(tmp_path: Path) -> None:
    share = segment_bytes(16, BLOCK_BYTES)
    with host(tmp_path, share_bytes=share) as one, host(tmp_path, share_bytes=share) as two:
        for _ in range(10):
            for own, other in ((one, two), (two, one)):
                names = new_names(3)
                locations = own.save(names, (1, 2, 3)).locations
                assert other.load(names, locations, (40, 41, 42)).num_loaded == 3
                assert np.array_equal(other.pool[40:43], own.pool[1:4])


def test_what_the_dead_left_is_shared_out_and_what_is_beyond_the_budget_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_segments, "ORPHAN_S", 0.0)
    monkeypatch.setattr(writer, "SWEEP_S", 0.1)
    share = segment_bytes(16, BLOCK_BYTES)
    with host(tmp_path, share_bytes=share) as one:
        for _ in range(8):
            one.save(new_names(10), TEN)
    left = bytes_in(tmp_path)
    with host(tmp_path, share_bytes=left // 2, total_bytes=left) as two:
        two.save(new_names(1), (1,))
        with host(tmp_path, share_bytes=left // 2, total_bytes=left) as three:
            three.save(new_names(1), (1,))
            wait_until(lambda: bytes_in(tmp_path) <= left, "what is beyond the budget goes")
    with host(tmp_path, share_bytes=left // 2, total_bytes=left // 2) as last:
        last.save(new_names(1), (1,))
        wait_until(lambda: bytes_in(tmp_path) <= left // 2, "half of it goes")
        assert last.save(new_names(1), (1,)).error is None


def test_the_budget_is_shared_by_all_that_write(tmp_path: Path) -> None:
    cache = CacheConfig(folder=str(tmp_path / "cache"), disk_mb=10)
    deployment = Deployment(
        prefill=UnitsConfig(units=2), decode=UnitsConfig(ranks=3, ranks_per_node=3), cache=cache
    )
    prefill, decode = share_of(deployment, "prefill"), share_of(deployment, "decode")
    assert prefill > decode > 0
    assert 10 * 2**20 - 5 <= 2 * prefill + 3 * decode <= 10 * 2**20
    pool = np.zeros((4, BLOCK_BYTES), dtype=np.uint8)
    store = make_store(Run("run", deployment, fingerprint="model"), "decode", pool, lambda: None)
    assert store is not None
    store.submit(StoreBlocks(1, new_names(2), (0, 1), (1, 2)))
    (done,) = wait_until(store.take, "the blocks are written")
    store.stop(DEADLINE_S)
    assert isinstance(done, BlocksStored)
    assert None not in done.locations
    (path,) = (tmp_path / "cache").iterdir()
    assert path.stat().st_size <= 2 << 20
    assert make_store(Run("run", Deployment()), "decode", pool, lambda: None) is None


def test_a_store_flushes_what_waits_when_it_stops(tmp_path: Path) -> None:
    names = new_names(10)
    one = Host(tmp_path)
    one.begin_save(names, TEN)
    one.stop()
    (done,) = one.store.take()
    with host(tmp_path) as two:
        assert two.load(names, done.locations, INTO).num_loaded == 10  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_had_is_waited_for_and_not_spun_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with host(tmp_path / "file", limits=WriteLimits(pause_s=1000.0)) as one:
        assert one.save(new_names(1), (1,)).error
        assert one.store._writer._next_batch(deque(), []) is None, "its thread has nothing to do"

"""Test the store on a real file system on a loop device that fails (EIO) or stops answering
(fsfreeze). Root only.
"""

import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hadal.core.cache import split
from hadal.runtime.store.segments import Segment, segment_numbers
from hadal.runtime.store.view import DiskView
from hadal.runtime.store.writer import WriteLimits
from tests.needs import leave_out
from tests.unit.runtime.disks import host, new_names
from tests.waiting import DEADLINE_S, wait_until

DISK_BYTES = 24 << 20
pytestmark = pytest.mark.needs("mount")


@dataclass
class Disk:
    image: Path
    folder: Path

    def lose(self) -> None:
        """Truncate the device, so that requests to it fail."""
        os.truncate(self.image, 64 * 1024)

    def freeze(self, *, stop: bool) -> None:
        """Freeze or thaw the file system: writers wait in the kernel."""
        subprocess.run(
            ["fsfreeze", "-f" if stop else "-u", str(self.folder)], check=True, timeout=60
        )


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """Mount a file system on a sparse image in memory. The test sets how many bytes the memory
    holds; beyond that, writes fail.
    """
    behind, one = tmp_path / "memory", Disk(tmp_path / "memory" / "image", tmp_path / "disk")
    behind.mkdir()
    one.folder.mkdir()
    size = getattr(request, "param", 2 * DISK_BYTES)
    run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(behind)])
    try:
        with one.image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(one.image)])
        if subprocess.run(
            ["mount", "-o", "loop", str(one.image), str(one.folder)], check=False, timeout=60
        ).returncode:
            leave_out("no loop device can be had here", "sudo make test")
        try:
            yield one
        finally:
            subprocess.run(
                ["fsfreeze", "-u", str(one.folder)], check=False, timeout=60, capture_output=True
            )
            run(["umount", "-l", str(one.folder)])
    finally:
        run(["umount", "-l", str(behind)])


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=60)


def test_a_disk_that_fails_to_read_is_a_miss_and_one_line(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hadal.disk")
    names = new_names(10)
    with host(disk.folder, limits=WriteLimits(pause_s=0.01)) as one:
        locations = one.save(names, tuple(range(1, 11))).locations
        assert None not in locations
        before = one.pool[21:31].copy()
        disk.lose()
        for _ in range(3):
            loaded = one.load(names, locations, tuple(range(21, 31)))
            assert loaded.num_loaded == 0
            assert loaded.error
        assert np.array_equal(one.pool[21:31], before)
    reads = [record for record in caplog.records if "fails (Input/output error)" in record.message]
    assert len(reads) == 1


@pytest.mark.parametrize("disk", [4 << 20], indirect=True)
def test_a_disk_that_fails_to_write_is_refused_and_one_line(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hadal.disk")
    ten, saved, num_refused = tuple(range(1, 11)), [], 0
    with host(disk.folder, share_bytes=16 << 20, limits=WriteLimits(pause_s=0.01)) as one:
        for _ in range(60):
            names = new_names(10)
            stored = one.save(names, ten)
            if None in stored.locations:
                assert stored.error
                num_refused += 1
            else:
                saved.append((names, stored.locations))
        assert saved
        assert num_refused
        loads = []
        for names, locations in saved:
            loads.append(one.load(names, locations, tuple(range(21, 31))))
            num = loads[-1].num_loaded
            assert np.array_equal(one.pool[21 : 21 + num], one.pool[1 : 1 + num])
        # When full, this device lies once: it reports a write as done and durable, and loses a
        # part.
        broken = [load for load in loads if load.num_loaded < 10]
        assert len(broken) <= 1
        assert all(load.num_damaged == 1 for load in broken)
    kinds = {one.message.removeprefix("disk cache: ").split(" ")[0] for one in caplog.records}
    assert kinds <= {"the", "slot"}
    assert len(caplog.records) <= 3, "a line for each cause, at whatever it is met"


def test_a_disk_that_stops_answering_holds_no_block_of_the_pool(disk: Disk) -> None:
    with host(disk.folder, limits=WriteLimits(deadline_s=0.3)) as one:
        one.save(new_names(1), (1,))
        wanted, names = one.pool[2].copy(), new_names(1)
        disk.freeze(stop=True)
        one.begin_save(names, (2,))
        stored = one.take()
        assert (stored.locations, stored.error) == ((None,), "the disk hangs")
        one.pool[2] = 0
        disk.freeze(stop=False)
        # The late write is complete, and has the original bytes.
        location = one.save_again(names, (2,))
        assert one.load(names, location, (40,)).num_loaded == 1
        assert np.array_equal(one.pool[40], wanted)
    assert all(
        Segment.open(disk.folder, number).is_whole() for number in segment_numbers(disk.folder)
    )


def test_a_read_only_disk_is_read_and_not_written(disk: Disk) -> None:
    names, ten = new_names(10), tuple(range(1, 11))
    with host(disk.folder) as one:
        locations = one.save(names, ten).locations
    run(["mount", "-o", "remount,ro", str(disk.folder)])
    with host(disk.folder, limits=WriteLimits(pause_s=0.01)) as two:
        two.pool[1:11] = one.pool[1:11]
        assert two.load(names, locations, tuple(range(21, 31))).num_loaded == 10
        assert np.array_equal(two.pool[21:31], one.pool[1:11])
        assert two.save(new_names(1), (1,)).locations == (None,)
        view = DiskView(disk.folder, "model", lambda: None, look_s=0.01)
        (news,) = wait_until(view.take, "the view has looked")
        assert set(split(news.added)) == set(split(names))
        view.mark(news.locations)
        wait_until(lambda: view.troubles.kind_to_count, "the mark is refused")
        view.stop(DEADLINE_S)
        assert view.take() == []

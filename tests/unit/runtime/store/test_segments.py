"""Test segments: a slot has what its record says, or the record is rejected."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hadal.runtime.store import segments as module
from hadal.runtime.store.buffers import HUGE_PAGE, make_buffer
from hadal.runtime.store.segments import (
    NAME,
    OtherModelError,
    Segment,
    SegmentError,
    SegmentTakenError,
    Words,
    names_of,
    remove_unfinished,
    segment_bytes,
    segment_numbers,
    segment_path,
    sum_of,
)
from tests.needs import leave_out

BLOCK_BYTES = 5000
SLOTS = 9
RNG = np.random.default_rng(3)
NAMES = [RNG.bytes(16) for _ in range(SLOTS)]


def make(folder: Path) -> Segment:
    return Segment.create(folder, "model", BLOCK_BYTES, SLOTS)


def fill(segment: Segment, first: int, names: list[bytes], sequence: int = 1) -> Words:
    buffer = make_buffer(BLOCK_BYTES, len(names) * 8192)
    for row, name in enumerate(names):
        buffer[row, :BLOCK_BYTES] = np.random.default_rng(list(name)).integers(
            0, 256, BLOCK_BYTES, dtype=np.uint8
        )
    sums = [sum_of(buffer[row, :BLOCK_BYTES]) for row in range(len(names))]
    count = len(names)
    records = segment.records(first, names, range(count), sums, range(sequence, sequence + count))
    segment.clear(first, count)
    segment.write_blocks(first, buffer[:count])
    segment.write_records(first, records)
    segment.sync()
    return records


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def test_what_was_written_is_read_by_another_descriptor(tmp_path: Path) -> None:
    segment = make(tmp_path)
    records = fill(segment, 2, NAMES[:3])
    segment.close()
    again = Segment.open(tmp_path, segment.number)
    table = again.table()
    assert again.is_good(table).tolist() == [False] * 2 + [True] * 3 + [False] * 4
    assert names_of(table[2:5]) == NAMES[:3]
    assert np.array_equal(table[2:5], records)
    buffer = make_buffer(BLOCK_BYTES, 3 * 8192)
    again.read_blocks(2, buffer)
    for row in range(3):
        assert sum_of(buffer[row, :BLOCK_BYTES]) == records[row, 3:5].tobytes()


@pytest.mark.promise("Everything that kill -9 leaves behind is therefore complete or absent")
def test_any_flipped_bit_of_a_record_is_seen(tmp_path: Path) -> None:
    segment = make(tmp_path)
    fill(segment, 0, NAMES)
    for offset in range(0, 64, 3):
        flip(segment.path, module.PAGE + 64 * 4 + offset)
        good = segment.is_good(segment.table())
        assert good.sum() == SLOTS - 1, offset
        assert not good[4]
        flip(segment.path, module.PAGE + 64 * 4 + offset)
    assert segment.is_good(segment.table()).all()


def test_a_record_is_believed_only_where_it_was_written(tmp_path: Path) -> None:
    one, other = make(tmp_path), make(tmp_path)
    records = fill(one, 0, NAMES[:2])
    one.write_records(5, records)
    assert one.is_good(one.table()).tolist() == [True, True] + [False] * 7
    other.write_records(0, records)
    assert not other.is_good(other.table()).any()
    assert one.is_good(records[1:], first=1).all()


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 24, 32, 40, 110])
def test_a_damaged_header_is_no_segment(tmp_path: Path, offset: int) -> None:
    segment = make(tmp_path)
    flip(segment.path, offset)
    with pytest.raises(SegmentError):
        Segment.open(tmp_path, segment.number)


def test_a_segment_that_was_cut_off_is_none(tmp_path: Path) -> None:
    segment = make(tmp_path)
    fill(segment, 0, NAMES)
    reader = Segment.open(tmp_path, segment.number)
    assert reader.is_whole()
    os.truncate(segment.path, segment.total_bytes - 8192 - 1)
    assert not reader.is_whole()
    with pytest.raises(SegmentError, match="cut off"):
        Segment.open(tmp_path, segment.number)
    with pytest.raises(SegmentError, match="cut off"):
        reader.read_blocks(SLOTS - 2, make_buffer(BLOCK_BYTES, 2 * 8192))
    os.truncate(segment.path, 1000)
    with pytest.raises(SegmentError, match="cut off"):
        reader.changes()


def test_a_copy_under_another_name_is_none(tmp_path: Path) -> None:
    segment = make(tmp_path)
    segment.path.rename(segment_path(tmp_path, segment.number ^ 1))
    with pytest.raises(SegmentError, match="header"):
        Segment.open(tmp_path, segment.number ^ 1)


def test_another_models_segment_is_told_apart(tmp_path: Path) -> None:
    segment = make(tmp_path)
    segment.require("model", BLOCK_BYTES)
    with pytest.raises(OtherModelError):
        segment.require("tuned", BLOCK_BYTES)
    with pytest.raises(OtherModelError):
        segment.require("model", BLOCK_BYTES + 4)


def test_only_a_dead_writers_segment_is_adopted(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hadal.runtime.store.segments import Segment\n"
        f"segment = Segment.create(Path({str(tmp_path)!r}), 'model', {BLOCK_BYTES}, {SLOTS})\n"
        "print(segment.number, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4] / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        with pytest.raises(SegmentTakenError):
            Segment.adopt(tmp_path, number)
        process.kill()
    adopted = Segment.adopt(tmp_path, number)
    with pytest.raises(SegmentTakenError):
        Segment.adopt(tmp_path, number)
    fill(adopted, 0, NAMES[:1])
    adopted.close()
    Segment.adopt(tmp_path, number).close()


def test_an_unfinished_segment_is_removed_once_its_maker_is_dead(tmp_path: Path) -> None:
    left = tmp_path / f"{5:016x}{module.NEW_SUFFIX}"
    left.write_bytes(b"half")
    segment = make(tmp_path)
    remove_unfinished(tmp_path)
    assert not left.exists()
    assert segment_numbers(tmp_path) == [segment.number]
    (tmp_path / "notes.txt").write_text("not a segment")
    assert segment_numbers(tmp_path) == [segment.number]


@pytest.mark.needs("root")
def test_another_users_unfinished_segment_stays_and_stops_nobody(tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        leave_out("no setpriv", "apt-get install util-linux")
    left = tmp_path / f"{5:016x}{module.NEW_SUFFIX}"
    left.write_bytes(b"half")
    left.chmod(0o600)
    os.chown(left, 65534, 65534)
    tried = (
        "from pathlib import Path; from hadal.runtime.store.segments import *;"
        f" remove_unfinished(Path({str(tmp_path)!r}))"
    )
    # Root without these capabilities is like any user.
    command = [
        "setpriv",
        "--bounding-set=-dac_override,-dac_read_search",
        sys.executable,
        "-c",
        tried,
    ]
    subprocess.run(command, check=True, timeout=180)
    assert left.exists()


@pytest.mark.parametrize("suffix", [module.SUFFIX, module.NEW_SUFFIX])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"notes{suffix}").write_text("somebody's")
    (tmp_path / f"{1:016x}{suffix}.bak").write_text("somebody's")
    (tmp_path / f"{2:016x}{suffix}").mkdir()
    (tmp_path / f"{3:016x}{suffix}").symlink_to(tmp_path / f"notes{suffix}")
    os.mkfifo(tmp_path / f"{4:016x}{suffix}")
    before = sorted(tmp_path.iterdir())
    remove_unfinished(tmp_path)
    assert segment_numbers(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_segment_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space|too large"):
        Segment.create(tmp_path, "model", 1 << 42, 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_uses_and_damage_are_counted_by_readers(tmp_path: Path) -> None:
    segment = make(tmp_path)
    records = fill(segment, 0, NAMES)
    reader = Segment.open(tmp_path, segment.number)
    reader.mark_used(np.array([3, 3, 8]))
    reader.mark_used(np.array([3]))
    assert segment.uses().tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 1]
    before = segment.changes()
    reader.mark_damaged(2, int(records[2, 5]))
    assert segment.changes() != before
    assert segment.damaged().tolist() == [0, 0, 3] + [0] * 6
    before = reader.changes()
    segment.tell_change()
    assert reader.changes() != before
    # The slot's next record differs.
    again = fill(segment, 2, [NAMES[0]], sequence=100)
    assert segment.damaged()[2] != again[0, 5]
    assert again[0, NAME].tobytes() == NAMES[0]


def test_sizes_are_whole_pages(tmp_path: Path) -> None:
    segment = make(tmp_path)
    assert segment.slot_bytes == 8192
    assert segment.path.stat().st_size == segment.total_bytes == segment_bytes(SLOTS, BLOCK_BYTES)
    assert make_buffer(BLOCK_BYTES, 100).shape == (1, 8192)
    assert make_buffer(BLOCK_BYTES, 20_000).ctypes.data % HUGE_PAGE == 0

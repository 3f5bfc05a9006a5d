"""Outside view of a disk cache's folder, by the format of runtime/store/segments: its blocks, and
ways to damage them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hadal.runtime.store.segments import (
    PAGE,
    SEQUENCE,
    SUM,
    OtherModelError,
    Segment,
    SegmentError,
    names_of,
    segment_numbers,
    segment_path,
    sum_of,
)


@dataclass(frozen=True)
class Record:
    """A block that readers can find."""

    name: bytes
    segment: int
    disk_slot: int
    sequence: int
    is_whole: bool
    """True if the block's bytes match the record's checksum."""


def records_on_disk(folder: Path) -> list[Record]:
    """Return every block that a table in the folder names and that is not marked damaged. Each
    block's checksum is tested.
    """
    found = []
    for number in segment_numbers(folder):
        segment = Segment.open(folder, number)
        try:
            table = segment.table()
            good = segment.is_good(table) & (segment.damaged() != table[:, SEQUENCE])
            with segment.path.open("rb") as file:
                for slot in np.flatnonzero(good).tolist():
                    file.seek(_data_at(segment, slot))
                    block = np.frombuffer(file.read(segment.block_bytes), dtype=np.uint8)
                    is_whole = sum_of(block) == table[slot, SUM].tobytes()
                    [name] = names_of(table[slot : slot + 1])
                    found.append(Record(name, number, slot, int(table[slot, SEQUENCE]), is_whole))
        finally:
            segment.close()
    return found


def names_on_disk(folder: Path, fingerprint: str = "") -> set[bytes]:
    """Return the names of all blocks that can be found; with a fingerprint, only its model's.
    Blocks are not read, so this is safe while a server writes them.
    """
    names = set()
    for number in segment_numbers(folder):
        try:
            segment = Segment.open(folder, number)
        except (SegmentError, FileNotFoundError):  # The file was cut off, or deleted meanwhile.
            continue
        try:
            if fingerprint:
                segment.require(fingerprint, segment.block_bytes)
            table = segment.table()
            is_there = segment.is_good(table) & (segment.damaged() != table[:, SEQUENCE])
            names |= set(names_of(table[is_there]))
        except OtherModelError:
            continue
        finally:
            segment.close()
    return names


# ---- damage ----
def flip_bits(folder: Path, rng: random.Random) -> int:
    """Flip one bit in every block; return the number of blocks."""
    records = records_on_disk(folder)
    for record in records:
        path, at = _block(folder, record)
        segment = Segment.open(folder, record.segment)
        size = segment.block_bytes
        segment.close()
        _flip(path, at + rng.randrange(size), 1 << rng.randrange(8))
    return len(records)


def cut_off(folder: Path, rng: random.Random) -> int:
    """Truncate every segment within one of its blocks; return the number of segments."""
    records = records_on_disk(folder)
    for number in segment_numbers(folder):
        used = [record for record in records if record.segment == number]
        path, at = (
            _block(folder, rng.choice(used)) if used else (segment_path(folder, number), 5 * PAGE)
        )
        with path.open("r+b") as file:
            file.truncate(at + 100)
    return len(segment_numbers(folder))


def tables_of(folder: Path) -> dict[int, bytes]:
    """Return segment number -> current table."""
    tables = {}
    for number in segment_numbers(folder):
        segment = Segment.open(folder, number)
        tables[number] = segment.table().tobytes()
        segment.close()
    return tables


def put_back(folder: Path, tables: dict[int, bytes]) -> int:
    """Write old tables over newer blocks; return how many of their records name blocks that are gone."""
    before = records_on_disk(folder)
    for number in segment_numbers(folder):
        if number in tables:
            with segment_path(folder, number).open("r+b") as file:
                file.seek(PAGE)
                file.write(tables[number])
    assert all(record.is_whole for record in before)
    return sum(not record.is_whole for record in records_on_disk(folder))


def _block(folder: Path, record: Record) -> tuple[Path, int]:
    """Return a block's file and the offset at which the block begins."""
    segment = Segment.open(folder, record.segment)
    try:
        return segment.path, _data_at(segment, record.disk_slot)
    finally:
        segment.close()


def _data_at(segment: Segment, slot: int) -> int:
    """Return a slot's offset; the slots are the last part of the file."""
    return segment.total_bytes - (segment.num_slots - slot) * segment.slot_bytes


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [old] = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ bit]))

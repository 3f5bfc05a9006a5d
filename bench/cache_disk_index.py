"""What a block costs in the disk cache's index, beside SQLite and LMDB as the index: to enter it
durably, to look it up, and to find all of them again after a restart.

    python -m bench.cache_disk_index [--quick] [--folder DIR]

Blocks come in batches of 64, each made durable (fdatasync; SQLite in WAL mode with synchronous =
FULL; LMDB as it is by default), no data beside them. All columns but the first are the processor's
time, of all threads: ours shares its fdatasync with the data, so in service entering costs that and
no more; the others would sync once more. A look-up is by name, in random order; the record of ours
is verified on disk before a block is used, as many at a time as a load of 4,096 tokens has.
Recovery: from the files to a map in memory that says where each block lies. `lmdb` is measured
where it is installed.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cache_disk import working_folder
from hadal.core.cache import NAME_BYTES, DiskLocation, split
from hadal.kv.disk_index import DiskIndex
from hadal.kv.disk_slots import DiskSlots
from hadal.runtime.store.own import OwnBlocks
from hadal.runtime.store.segments import (
    OwnSegments,
    Segment,
    Troubles,
    segment_bytes,
    segment_numbers,
)
from hadal.runtime.store.view import DiskView

BATCH = 64
SEGMENT_SLOTS = 4096
BLOCK_BYTES = 64
SUM = bytes(16)
TIMEOUT_S = 120.0


class Segments:
    """Ours: records in the segments' tables, DiskSlots in the writer, DiskIndex in the leader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "segments"
        self.folder.mkdir()
        self.disk_slots, self.index = DiskSlots(), DiskIndex()
        self.number_to_segment: dict[int, Segment] = {}
        self.sequence = 1

    def insert(self, names: list[bytes]) -> None:
        if self.disk_slots.num_free < len(names):
            segment = Segment.create(self.folder, "bench", BLOCK_BYTES, SEGMENT_SLOTS)
            self.number_to_segment[segment.number] = segment
            self.disk_slots.add_segment(segment.number, segment.num_slots)
        locations, _ = self.disk_slots.take(names, range(len(names)))
        there = [location for location in locations if location is not None]
        first, segment = there[0].disk_slot, self.number_to_segment[there[0].segment]
        numbers = range(self.sequence, self.sequence + len(names))
        records = segment.records(first, names, range(len(names)), [SUM] * len(names), numbers)
        self.sequence += len(names)
        segment.clear(first, len(names))
        segment.write_records(first, records)
        segment.sync()
        segment.tell_change()
        self.disk_slots.wrote(names)
        self.index.put(b"".join(names), there)

    def find(self, name: bytes) -> DiskLocation | None:
        return self.index.find(name)

    def check_records(self) -> None:
        """Every record, read and checked."""
        for segment in self.number_to_segment.values():
            for first in range(0, segment.num_slots, BATCH):
                assert segment.is_good(segment.table(first, BATCH), first).all()

    def close(self) -> None:
        for segment in self.number_to_segment.values():
            segment.close()

    def recover_writer(self) -> int:
        """What a writer that starts does."""
        numbers = segment_numbers(self.folder)
        share = len(numbers) * segment_bytes(SEGMENT_SLOTS, BLOCK_BYTES)
        troubles = Troubles(self.folder)
        own = OwnBlocks(
            OwnSegments(self.folder, "bench", BLOCK_BYTES, share, share, troubles), troubles
        )
        own.enter()
        num = own.num_blocks
        own.close()
        return num

    def recover_leader(self) -> int:
        """What a leader that starts does."""
        view, index = DiskView(self.folder, "bench", lambda: None), DiskIndex()
        until_s = time.monotonic() + TIMEOUT_S
        while not (news := view.take()) and time.monotonic() < until_s:
            time.sleep(0.0005)
        for one in news:
            index.put(one.added, one.locations)
        view.stop(TIMEOUT_S)
        return len(index)


class Sqlite:
    """A table in a file, name to location and sum."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "index.sqlite"
        self._open()
        self._db.execute(
            "create table blocks (name blob primary key, segment int, slot int, position int, sum"
            " blob) without rowid"
        )

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")

    def insert(self, names: list[bytes]) -> None:
        self._db.execute("begin")
        rows = [(name, 1, slot, slot, SUM) for slot, name in enumerate(names)]
        self._db.executemany("insert into blocks values (?, ?, ?, ?, ?)", rows)
        self._db.execute("commit")

    def find(self, name: bytes) -> object:
        return self._db.execute(
            "select segment, slot, sum from blocks where name = ?", (name,)
        ).fetchone()

    def close(self) -> None:
        self._db.close()

    def recover(self) -> int:
        self._open()
        found = {
            name: (segment, slot)
            for name, segment, slot in self._db.execute("select name, segment, slot from blocks")
        }
        self._db.close()
        return len(found)


class Lmdb:
    """A memory-mapped tree, name to location and sum."""

    def __init__(self, folder: Path, module: Any) -> None:
        self._module, self._path = module, str(folder / "lmdb")
        self._open()

    def _open(self) -> None:
        self._env = self._module.open(self._path, map_size=1 << 31)

    def insert(self, names: list[bytes]) -> None:
        with self._env.begin(write=True) as change:
            for slot, name in enumerate(names):
                change.put(name, slot.to_bytes(16, "little") + SUM)

    def find(self, name: bytes) -> object:
        with self._env.begin() as look:
            return look.get(name)

    def close(self) -> None:
        self._env.close()

    def recover(self) -> int:
        self._open()
        with self._env.begin() as look:
            found = {bytes(name): bytes(value[:16]) for name, value in look.cursor()}
        self._env.close()
        return len(found)


def microseconds(act: Callable[[], object], count: int) -> float:
    """Of the processor, for each of `count` blocks."""
    begun_s = time.process_time()
    act()
    return (time.process_time() - begun_s) / count * 1e6


def measure(
    table: Table,
    what: str,
    index: Any,
    names: list[bytes],
    recoveries: dict[str, Callable[[], int]],
) -> None:
    """Fill, ask and recover one index, and add its rows."""
    batches = [names[at : at + BATCH] for at in range(0, len(names), BATCH)]
    begun_s = time.perf_counter()
    cpu_us = microseconds(lambda: [index.insert(batch) for batch in batches], len(names))
    insert_us = (time.perf_counter() - begun_s) / len(names) * 1e6
    asked = random.Random(4).sample(names, min(len(names), 20_000))
    find_us = microseconds(lambda: [index.find(name) for name in asked], len(asked))
    record_us = (
        microseconds(index.check_records, len(names)) if isinstance(index, Segments) else None
    )
    index.close()
    for kind, recover in recoveries.items():
        begun_s = time.process_time()
        if recover() != len(names):
            raise RuntimeError(f"{what} did not find its {len(names)} blocks again")
        recover_us = (time.process_time() - begun_s) / len(names) * 1e6
        table.add_row(
            f"{what}{kind}",
            f"{insert_us:.1f}",
            f"{cpu_us:.1f}",
            f"{find_us:.2f}",
            f"{record_us:.2f}" if record_us else "",
            f"{recover_us:.2f}",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_disk_index", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the blocks")
    parser.add_argument(
        "--folder", type=Path, help="on the disk that is meant; default: beside the peers"
    )
    options = parser.parse_args(arguments)
    count = (20 if options.quick else 100) * 1024
    names = list(split(np.random.default_rng(1).bytes(NAME_BYTES * count)))
    table = Table(title=f"{count:,} blocks, microseconds a block")
    for column in ("index", "insert", "insert, processor", "look up", "check record", "recover"):
        table.add_column(column, justify="right")
    with working_folder(options.folder) as folder:
        ours = Segments(folder)
        ways = {", leader": ours.recover_leader, ", writer": ours.recover_writer}
        measure(table, "segments", ours, names, ways)
        sqlite = Sqlite(folder)
        measure(table, "SQLite", sqlite, names, {"": sqlite.recover})
        try:
            lmdb = Lmdb(folder, importlib.import_module("lmdb"))
            measure(table, "LMDB", lmdb, names, {"": lmdb.recover})
        except ImportError:
            table.add_row("LMDB", "not installed")
    Console(soft_wrap=True).print(table)


if __name__ == "__main__":
    main()

"""Writers of a disk cache are killed at random moments. Blocks acknowledged as durable are found
again, byte for byte, and a concurrent reader never gets a wrong block. `HADAL_LEVEL=all`: 200
rounds.
"""

import os
import random
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hadal.core.cache import DiskLocation, split
from hadal.core.messages.pools import ReadBlocks
from hadal.runtime.store.loader import Loader
from hadal.runtime.store.segments import segment_bytes
from hadal.runtime.store.troubles import Troubles
from hadal.runtime.store.view import DiskView
from tests.dist.disk_child import BLOCK_BYTES, FINGERPRINT, content
from tests.dist.segments import put_back, tables_of
from tests.dist.served import fork_module
from tests.fresh import fresh
from tests.levels import FULL, LEVEL
from tests.waiting import DEADLINE_S, deadline, join, wait_until

NUM_ROUNDS = 200 if FULL else 4 if LEVEL == "test" else 12
MAX_READS = 40
"""Maximum number of concurrent reads before a writer is killed."""
ROUNDS_OF_A_FOLDER = 3
"""Rounds per folder: later rounds adopt the segments of the first ones."""
TINY_BYTES = segment_bytes(24, BLOCK_BYTES)
AMPLE_BYTES = 64 << 20


class Child:
    """One writer. Its lines are read at once, so that it never blocks on output."""

    def __init__(self, folder: Path, seed: int, share_bytes: int, limit: int = 0) -> None:
        arguments = [str(folder), str(seed), str(share_bytes), str(limit)]
        self.process = fork_module("tests.dist.disk_child", arguments, os.environ)
        self.lines: list[str] = []
        self.has_written = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.decode())
            self.has_written |= line.startswith(b"A")

    def end(self, *, kill: bool = True) -> None:
        if kill:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        join(self._thread)
        self.process.stdout.close()

    def names(self, what: str) -> set[bytes]:
        return {
            bytes.fromhex(word)
            for line in self.lines
            if line[0] == what
            for word in line.split()[1:]
        }

    def num_in_flight(self) -> int:
        counts: Counter[str] = Counter()
        for line in self.lines:
            what, *words = line.split()
            if what in "SF":
                counts[what] += int(words[0])
            elif what == "A":
                counts[what] += len(words)
        return counts["S"] - counts["A"] - counts["F"]


class Reader:
    """Reader of blocks that a view finds on disk; fails on a wrong block."""

    def __init__(self, folder: Path) -> None:
        self.view = DiskView(folder, FINGERPRINT, lambda: None, look_s=0.02)
        self.pool = np.zeros((32, BLOCK_BYTES), dtype=np.uint8)
        self._read = threading.Event()
        self.loader = Loader(folder, FINGERPRINT, self.pool, Troubles(folder), self._read.set)
        self.locations: dict[bytes, DiskLocation] = {}
        self.num_read = self.num_damaged = 0
        self._next_id = 0

    def look(self) -> None:
        for news in self.view.take():
            for name in split(news.dropped):
                self.locations.pop(name, None)
            self.locations.update(zip(split(news.added), news.locations, strict=True))

    def wait_look(self) -> None:
        """Wait for the view's first scan and record all blocks."""
        for one in wait_until(self.view.take, "the view has looked"):
            self.locations.update(zip(split(one.added), one.locations, strict=True))

    def read(self, names: list[bytes]) -> int:
        """Load blocks; return how many loaded, counted from the first."""
        self._next_id += 1
        locations = tuple(self.locations[name] for name in names)
        self.loader.submit(
            ReadBlocks(self._next_id, b"".join(names), locations, tuple(range(len(names))))
        )
        while not (done := self.loader.take()):
            assert self._read.wait(DEADLINE_S)
            self._read.clear()
        for index in range(done[0].num_loaded):
            assert self.pool[index].tobytes() == content(names[index]), (
                "a load returned wrong bytes"
            )
        self.num_read += done[0].num_loaded
        self.num_damaged += done[0].num_damaged
        return done[0].num_loaded

    def read_some(self, rng: random.Random) -> None:
        self.look()
        known = list(self.locations)
        if known:
            self.read(rng.sample(known, min(len(known), rng.randint(1, 8))))

    def close(self) -> None:
        self.view.stop(DEADLINE_S)
        self.loader.stop(deadline())


def found(folder: Path) -> set[bytes]:
    """Return the names of blocks that a new reader finds and loads."""
    reader = Reader(folder)
    reader.wait_look()
    whole: set[bytes] = set()
    for name in list(reader.locations):
        if reader.read([name]):
            whole.add(name)
    assert reader.num_damaged == 0, "a record names a block that is not whole"
    reader.close()
    return whole


def play_round(
    folder: Path,
    rng: random.Random,
    alive: set[bytes],
    share_bytes: int,
    names_of: int | None = None,
) -> int:
    """Run one or two writers, kill them one after another, then check and update `alive`. Returns
    the number of blocks written.

    `names_of`: seed of all writers, which thus write blocks of the same names; None: each writer
    has its own seed.
    """
    seeds = [names_of or rng.getrandbits(60) for _ in range(rng.choice((1, 1, 2)))]
    children = [Child(folder, seed, share_bytes) for seed in seeds]
    reader = Reader(folder)
    try:
        for child in children:

            def has_written(child: Child = child) -> bool:
                reader.read_some(rng)
                return child.has_written

            wait_until(has_written, "a block is durable")
            for _ in range(rng.randint(0, MAX_READS)):
                reader.read_some(rng)
            child.end()
    finally:
        for child in children:
            child.end()
        reader.close()
    written: set[bytes] = set().union(*(child.names("A") for child in children))
    dropped: set[bytes] = set().union(*(child.names("D") for child in children))
    alive |= written
    alive -= dropped
    whole = found(folder)
    missing = alive - whole
    # At the kill, blocks in progress may have evicted others without reporting it.
    num_excused = (
        sum(child.num_in_flight() for child in children) if share_bytes == TINY_BYTES else 0
    )
    assert len(missing) <= num_excused, (
        f"{len(missing)} durable blocks are gone, {num_excused} were being replaced"
    )
    alive -= missing
    return len(written)


@pytest.mark.promise("Everything that kill -9 leaves behind is therefore complete or absent")
@pytest.mark.campaign("moments of kills are drawn")
def test_what_was_durable_is_found_after_kill_9(tmp_path: Path) -> None:
    for seed in (5, fresh().getrandbits(32)):
        print(f"seed {seed}")
        rng, num_written = random.Random(seed), 0
        alive: set[bytes] = set()
        for index in range(NUM_ROUNDS // 2):
            number, part = divmod(index, ROUNDS_OF_A_FOLDER)
            share_bytes = TINY_BYTES if number % 2 == 0 else AMPLE_BYTES
            if part == 0:
                alive = set()
            num_written += play_round(tmp_path / f"{seed}-{number}", rng, alive, share_bytes)
        assert num_written >= NUM_ROUNDS // 2


@pytest.mark.more("like the test before it, of blocks with the same names")
def test_writers_of_the_same_blocks_take_up_what_the_dead_left(tmp_path: Path) -> None:
    for seed in [fresh().getrandbits(32) for _ in range(2)]:
        print(f"seed {seed}")
        rng, alive = random.Random(seed), set[bytes]()
        for _ in range(ROUNDS_OF_A_FOLDER):
            play_round(tmp_path / str(seed), rng, alive, AMPLE_BYTES, names_of=seed)


def test_a_writer_that_ends_in_order_leaves_all_it_was_told_is_durable(tmp_path: Path) -> None:
    child = Child(tmp_path, 7, AMPLE_BYTES, limit=100)
    child.end(kill=False)
    assert child.process.poll() == 0
    assert len(child.names("A")) >= 100
    assert child.names("A") <= found(tmp_path)


def test_a_table_of_long_ago_names_no_wrong_block(tmp_path: Path) -> None:
    """The old table's records name slots that were overwritten since; every read detects that."""
    tables: dict[int, bytes] = {}
    for seed in (1, 2):
        child = Child(tmp_path, seed, TINY_BYTES, limit=60)
        child.end(kill=False)
        tables = tables or tables_of(tmp_path)
    assert put_back(tmp_path, tables) > 0, "nothing was overwritten; this test shows nothing"
    reader = Reader(tmp_path)
    reader.wait_look()
    for name in list(reader.locations):
        reader.read([name])
    assert reader.num_damaged > 0
    reader.close()

"""The disk cache's segments beside the plainest store there is: one file per block.

    python -m bench.cache_files [--quick] [--folder DIR]

A block's file is written under a temporary name, with its sum, made durable and renamed; a reader
verifies the sum before the block gets into the pool. Threads do it side by side, as in the store.
Two ways of making files durable: each by itself (fdatasync), and a batch of BATCH_BYTES at once
(syncfs), before it is renamed. Both give what the segments give: what was answered as stored is
there after power failed. Rounds take turns, the kernel's copies are dropped before every read, a
figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cache_disk import POOL_BYTES, StoreRun, block_sizes, working_folder
from hadal.runtime.store.segments import Bytes, make_buffer, sum_of
from hadal.runtime.store.writer import BATCH_BYTES

PAGE = 4096
NUM_THREADS = 4
"""One more than the store's readers have: a file is opened and closed for every block."""
NUM_FOLDERS = 256
"""Files are spread over folders by the first byte of their name."""


class FilesRun:
    """One file per block in a folder of its own, with a pool of random bytes.

    A file is a page with the sum of the block, then the block, so that both can pass the kernel's
    copies by (O_DIRECT), as a segment's slots do.
    """

    def __init__(self, folder: Path, block_bytes: int, num_bytes: int, *, is_batched: bool) -> None:
        self.folder = folder / "files"
        self.block_bytes = block_bytes
        self.num_blocks = num_bytes // block_bytes
        self._is_batched = is_batched
        rng = np.random.default_rng(5)
        num_rows = max(2, POOL_BYTES // block_bytes)
        self._pool: Bytes = rng.integers(0, 256, (num_rows, block_bytes), dtype=np.uint8)
        self._names = [os.urandom(16) for _ in range(self.num_blocks)]
        for number in range(NUM_FOLDERS):
            (self.folder / f"{number:02x}").mkdir(parents=True)
        self._threads = ThreadPoolExecutor(NUM_THREADS)
        # A page for the sum in front of each block, and the block padded to pages.
        self._buffers = [make_buffer(PAGE + block_bytes, 1)[0] for _ in range(NUM_THREADS)]
        self._free = list(range(NUM_THREADS))

    def write(self) -> float:
        begun_s = time.perf_counter()
        size = max(1, BATCH_BYTES // self.block_bytes)
        for first in range(0, self.num_blocks, size):
            batch = range(first, min(first + size, self.num_blocks))
            list(self._threads.map(self._write, batch))
            if self._is_batched:
                self._sync_all()
                list(self._threads.map(self._rename, batch))
            self._sync_folders({self._names[index][0] for index in batch})
        return time.perf_counter() - begun_s

    def forget(self) -> None:
        for path in self._paths():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def read(self) -> float:
        begun_s = time.perf_counter()
        is_good = list(self._threads.map(self._read, range(self.num_blocks)))
        elapsed_s = time.perf_counter() - begun_s
        assert all(is_good)
        return elapsed_s

    def close(self) -> None:
        self._threads.shutdown()
        shutil.rmtree(self.folder)

    def _paths(self) -> Iterator[Path]:
        return (self._path(index) for index in range(self.num_blocks))

    def _path(self, index: int) -> Path:
        name = self._names[index]
        return self.folder / f"{name[0]:02x}" / name.hex()

    @contextmanager
    def _buffer(self) -> Iterator[Bytes]:
        at = self._free.pop()
        try:
            yield self._buffers[at]
        finally:
            self._free.append(at)

    def _write(self, index: int) -> None:
        path = self._path(index)
        with self._buffer() as buffer:
            block = buffer[PAGE : PAGE + self.block_bytes]
            np.copyto(block, self._pool[index % len(self._pool)])
            buffer[:16] = np.frombuffer(sum_of(block), dtype=np.uint8)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
            fd = os.open(path.with_suffix(".new"), flags, 0o600)
            try:
                os.pwrite(fd, buffer.data, 0)
                if not self._is_batched:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
        if not self._is_batched:
            self._rename(index)

    def _rename(self, index: int) -> None:
        path = self._path(index)
        path.with_suffix(".new").rename(path)

    def _sync_all(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
        os.close(fd)

    def _sync_folders(self, numbers: set[int]) -> None:
        for number in numbers:
            fd = os.open(self.folder / f"{number:02x}", os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def _read(self, index: int) -> bool:
        with self._buffer() as buffer:
            fd = os.open(self._path(index), os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(fd, [buffer.data], 0)
            finally:
                os.close(fd)
            block = buffer[PAGE : PAGE + self.block_bytes]
            is_good = sum_of(block) == buffer[:16].tobytes()
            if is_good:
                np.copyto(self._pool[index % len(self._pool)], block)
            return is_good


def rates(console: Console, folder: Path, num_bytes: int, rounds: int) -> None:
    """Print a table: what segments write and read, and beside it one file per block."""
    table = Table(title=f"{num_bytes / 1e6:,.0f} MB a round, GB/s, median of {rounds} rounds")
    table.add_column("block")
    for what in ("write", "read"):
        for column in (what, "fdatasync", "ratio", "syncfs", "ratio"):
            table.add_column(column, justify="right")
    for name, block_bytes in block_sizes().items():
        ways: dict[str, Callable[[], StoreRun | FilesRun]] = {
            "segments": lambda size=block_bytes: StoreRun(folder, size, num_bytes),
            "fdatasync": lambda size=block_bytes: FilesRun(
                folder, size, num_bytes, is_batched=False
            ),
            "syncfs": lambda size=block_bytes: FilesRun(folder, size, num_bytes, is_batched=True),
        }
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            for way, make in ways.items():
                run = make()
                written = run.num_blocks * block_bytes / 1e9
                found.setdefault(("write", way), []).append(written / run.write())
                run.forget()
                found.setdefault(("read", way), []).append(written / run.read())
                run.close()
        row = [name]
        for what in ("write", "read"):
            mid = {way: statistics.median(found[what, way]) for way in ways}
            row.append(f"{mid['segments']:.2f}")
            for way in ("fdatasync", "syncfs"):
                row += [f"{mid[way]:.2f}", f"{mid[way] / mid['segments']:.2f}"]
        table.add_row(*row)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_files", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument(
        "--folder", type=Path, help="on the disk that is meant; default: beside the peers"
    )
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    console.print("[bold]disk cache[/bold]: segments beside one file per block")
    num_bytes, rounds = (256 << 20, 3) if options.quick else (512 << 20, 7)
    with working_folder(options.folder) as folder:
        rates(console, folder, num_bytes, rounds)


if __name__ == "__main__":
    main()

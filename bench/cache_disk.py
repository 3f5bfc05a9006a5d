"""The disk cache's store beside plain sequential access to the same disk.

    python -m bench.cache_disk [--quick] [--folder DIR]

Rates: the same bytes are written by the store (copied out of a pool, summed, fdatasync) and by
plain pwrite and fdatasync of a file that was reserved as well; then read by the store (verified,
copied into a pool) and by plain pread, once through the kernel's copies and once around them
(O_DIRECT), the copies dropped before every read. Rounds take turns, a figure is the median of them,
a ratio is to the better of the plain ways.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.checkpoints import MID, PEERS, SHIPPED
from hadal.core.cache import DiskLocation
from hadal.core.messages import BLOCK_TOKENS, ReadBlocks, StoreBlocks
from hadal.core.model_config import read_model_config
from hadal.core.plans import BlocksRead, BlocksStored
from hadal.runtime.store.buffers import make_buffer
from hadal.runtime.store.disk import DiskStore
from hadal.runtime.store.segments import Segment, segment_numbers

PLAIN_BYTES = 8 * 1024 * 1024
"""Of one plain read or write."""
POOL_BYTES = 64 * 1024 * 1024
SHARE_BYTES = 2 << 30
"""Of one of the two writers of a deployment as it comes."""
REQUEST_BLOCKS = 64
"""Blocks of one load or store: 4,096 tokens."""
TIMEOUT_S = 300.0


def block_sizes() -> dict[str, int]:
    """Bytes of a block of the models."""
    tiny = read_model_config(SHIPPED)
    mid = MID["num_hidden_layers"], MID["kv_lora_rank"] + MID["qk_rope_head_dim"]
    return {
        "hadal-tiny": tiny.num_hidden_layers * BLOCK_TOKENS * tiny.entry_dim * 4,
        "mid": mid[0] * BLOCK_TOKENS * mid[1] * 4,
        "V3 in bf16": 61 * BLOCK_TOKENS * 576 * 2,
    }


def take(store: DiskStore, count: int) -> list[BlocksRead | BlocksStored]:
    """Wait for so many outcomes."""
    done: list[BlocksRead | BlocksStored] = []
    until_s = time.monotonic() + TIMEOUT_S
    while len(done) < count:
        if time.monotonic() > until_s:
            raise RuntimeError("the store does not answer")
        time.sleep(0.0005)
        done += store.take()
    return done


class StoreRun:
    """One store in a folder of its own, with a pool of random bytes."""

    def __init__(self, folder: Path, block_bytes: int, num_bytes: int) -> None:
        self.folder = folder / "store"
        self.block_bytes = block_bytes
        self.num_blocks = num_bytes // block_bytes
        rng = np.random.default_rng(5)
        self.pool = rng.integers(
            0, 256, (max(2, POOL_BYTES // block_bytes), block_bytes), dtype=np.uint8
        )
        self.names = [os.urandom(16) for _ in range(self.num_blocks)]
        self.locations: list[DiskLocation] = []
        self.store = DiskStore(
            self.folder, "bench", self.pool, SHARE_BYTES, lambda: None, queue_bytes=4 * num_bytes
        )

    def requests(self) -> Iterator[tuple[int, list[bytes], tuple[int, ...]]]:
        """(first block, names, blocks of the pool)"""
        size = min(REQUEST_BLOCKS, len(self.pool))
        for first in range(0, self.num_blocks, size):
            names = self.names[first : first + size]
            at = first // size * size % (len(self.pool) - len(names) + 1)
            yield first, names, tuple(range(at, at + len(names)))

    def write(self) -> float:
        begun_s = time.perf_counter()
        count = 0
        for first, names, blocks in self.requests():
            positions = tuple(range(first, first + len(names)))
            self.store.submit(StoreBlocks(first, b"".join(names), positions, blocks))
            count += 1
        done = take(self.store, count)
        elapsed_s = time.perf_counter() - begun_s
        by_id = sorted(
            (one for one in done if isinstance(one, BlocksStored)), key=lambda one: one.store_id
        )
        self.locations = [
            location for one in by_id for location in one.locations if location is not None
        ]
        assert len(self.locations) == self.num_blocks, by_id[0].error
        return elapsed_s

    def forget(self) -> None:
        for number in segment_numbers(self.folder):
            segment = Segment.open(self.folder, number)
            segment.drop_pages()
            segment.close()

    def read(self) -> float:
        begun_s = time.perf_counter()
        count = 0
        for first, names, blocks in self.requests():
            locations = tuple(self.locations[first : first + len(names)])
            self.store.submit(ReadBlocks(first, b"".join(names), locations, blocks))
            count += 1
        done = take(self.store, count)
        elapsed_s = time.perf_counter() - begun_s
        assert all(isinstance(one, BlocksRead) and one.error is None for one in done), done
        return elapsed_s

    def close(self) -> None:
        self.store.stop(10.0)
        shutil.rmtree(self.folder)


class PlainRun:
    """The same bytes in one file."""

    def __init__(self, folder: Path, num_bytes: int, *, is_direct: bool) -> None:
        self._path = folder / "plain"
        self._num_bytes = num_bytes // PLAIN_BYTES * PLAIN_BYTES
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct else 0))
        os.posix_fallocate(self._fd, 0, self._num_bytes)
        os.fsync(self._fd)
        self._buffer: NDArray[np.uint8] = np.frombuffer(
            make_buffer(PLAIN_BYTES, PLAIN_BYTES)[0].data, dtype=np.uint8
        )
        self._buffer[:] = np.random.default_rng(6).integers(0, 256, PLAIN_BYTES, dtype=np.uint8)

    def write(self) -> float:
        begun_s = time.perf_counter()
        for offset in range(0, self._num_bytes, PLAIN_BYTES):
            os.pwrite(self._fd, self._buffer.data, offset)
        os.fdatasync(self._fd)
        return time.perf_counter() - begun_s

    def forget(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self) -> float:
        begun_s = time.perf_counter()
        for offset in range(0, self._num_bytes, PLAIN_BYTES):
            os.preadv(self._fd, [self._buffer.data], offset)
        return time.perf_counter() - begun_s

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()


def rates(console: Console, folder: Path, num_bytes: int, rounds: int) -> None:
    """Print a table: the store beside plain access, for each size of block."""
    table = Table(title=f"{num_bytes / 1e6:,.0f} MB a round, GB/s, median of {rounds} rounds")
    for column in (
        "block",
        "bytes",
        "store writes",
        "plain",
        "direct",
        "ratio",
        "store reads",
        "plain",
        "direct",
        "ratio",
    ):
        table.add_column(column, justify="right")
    for name, block_bytes in block_sizes().items():
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for kind in ("plain", "direct"):
                plain = PlainRun(folder, num_bytes, is_direct=kind == "direct")
                found.setdefault(f"{kind} write", []).append(plain.num_bytes / plain.write() / 1e9)
                plain.forget()
                found.setdefault(f"{kind} read", []).append(plain.num_bytes / plain.read() / 1e9)
                plain.close()
            run = StoreRun(folder, block_bytes, num_bytes)
            written = run.num_blocks * block_bytes
            found.setdefault("store write", []).append(written / run.write() / 1e9)
            run.forget()
            found.setdefault("store read", []).append(written / run.read() / 1e9)
            run.close()
        row = [name, f"{block_bytes:,}"]
        for what in ("write", "read"):
            mid = [
                statistics.median(found[f"{kind} {what}"]) for kind in ("store", "plain", "direct")
            ]
            row += [*(f"{one:.2f}" for one in mid), f"{mid[0] / max(mid[1:]):.2f}"]
        table.add_row(*row)
    console.print(table)


@contextmanager
def working_folder(asked: Path | None) -> Iterator[Path]:
    """A folder of its own on the disk that is measured."""
    base = asked or PEERS
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="cache-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_disk", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument(
        "--folder", type=Path, help="on the disk that is meant; default: beside the peers"
    )
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    console.print("[bold]disk cache[/bold]: the store beside plain sequential access")
    num_bytes, rounds = (256 << 20, 3) if options.quick else (512 << 20, 7)
    with working_folder(options.folder) as folder:
        rates(console, folder, num_bytes, rounds)


if __name__ == "__main__":
    main()

"""Room and time that the cache's ledgers take for a million blocks: targets 200 MB and 20 us a
block.

    python -m bench.cache_index [--quick]

Each ledger is filled in a process of its own that imports nothing else, and what the system says of
that process is reported: memory at its most, the interpreter included, and the processor's time for
each block.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.balance_loads import ROOT
from hadal.core.cache import NAME_BYTES, DiskLocation, split
from hadal.kv.blocks import BlockAllocator
from hadal.kv.disk_index import DiskIndex
from hadal.kv.disk_slots import DiskSlots

NUM_BLOCKS = 1_000_000
QUICK_BLOCKS = 100_000
CHAIN_BLOCKS = 200
MEMORY_TARGET_MB = 200.0
TIME_TARGET_US = 20.0


class Figures(msgspec.Struct):
    """What a ledger took."""

    num_blocks: int
    memory_mb: float
    """The most at any time."""
    insert_us: float
    lookup_us: float
    evict_us: float


def chains(first: int, num_blocks: int) -> Iterator[bytes]:
    """Names as they come: texts of CHAIN_BLOCKS blocks."""
    for text in range(first, first + num_blocks // CHAIN_BLOCKS):
        yield b"".join(
            blake2b(b"%d %d" % (text, block), digest_size=NAME_BYTES).digest()
            for block in range(CHAIN_BLOCKS)
        )


class Watch:
    """Adds up the processor's time of what runs in it; making names is not part of a ledger's
    work.
    """

    def __init__(self) -> None:
        self.took_s = 0.0
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.took_s += time.process_time() - self._start_s


def index(num_blocks: int) -> tuple[float, float, float]:
    """A leader's, that hears of texts, finds them and hears that they are gone."""
    ledger, (insert, lookup, evict) = DiskIndex(), (Watch(), Watch(), Watch())
    for text, chain in enumerate(chains(0, num_blocks)):
        locations = [DiskLocation(1_000_000 + text, slot) for slot in range(CHAIN_BLOCKS)]
        with insert:
            ledger.put(chain, locations)
    assert len(ledger) == num_blocks
    for chain in chains(0, num_blocks):
        with lookup:
            found = ledger.lookup(chain)
        assert len(found) == CHAIN_BLOCKS
    for chain in chains(0, num_blocks):
        with evict:
            ledger.drop(chain)
    assert not len(ledger)
    return insert.took_s, lookup.took_s, evict.took_s


def slots(num_blocks: int) -> tuple[float, float, float]:
    """A writer's: blocks are written, used once each, and then make room for as many others."""
    ledger, (insert, use, evict) = DiskSlots(), (Watch(), Watch(), Watch())
    ledger.add_segment(0, num_blocks)
    for watch, first in ((insert, 0), (evict, num_blocks)):
        for chain in chains(first, num_blocks):
            names = list(split(chain))
            with watch:
                ledger.take(names, range(CHAIN_BLOCKS))
                ledger.wrote(names)
        for slot in range(0, num_blocks if watch is insert else 0, CHAIN_BLOCKS):
            with use:
                ledger.used(0, range(slot, slot + CHAIN_BLOCKS), [1] * CHAIN_BLOCKS)
    assert len(ledger) == num_blocks
    return insert.took_s, use.took_s, evict.took_s


def pool(num_blocks: int) -> tuple[float, float, float]:
    """A rank's: prompts come, are found by the next ones, and then make room for as many others."""
    ledger, (insert, lookup, evict) = BlockAllocator(num_blocks + 1), (Watch(), Watch(), Watch())
    for watch, first in ((insert, 0), (evict, num_blocks)):
        for key, chain in enumerate(chains(first, num_blocks)):
            with watch:
                blocks = ledger.allocate(CHAIN_BLOCKS, key)
                assert blocks is not None
                ledger.name(blocks, chain, 0)
                ledger.free(blocks, key)
                ledger.take_changes()
        for key, chain in enumerate(chains(0, num_blocks) if watch is insert else ()):
            with lookup:
                found = ledger.lookup(chain)
                ledger.acquire(found, key)
                ledger.free(found, key)
            assert len(found) == CHAIN_BLOCKS
    return insert.took_s, lookup.took_s, evict.took_s


LEDGERS: dict[str, Callable[[int], tuple[float, float, float]]] = {
    "kv/disk_index": index,
    "kv/disk_slots": slots,
    "kv/blocks": pool,
}


def fill(name: str, num_blocks: int) -> Figures:
    """In this process. `num_blocks`: a multiple of CHAIN_BLOCKS."""
    took_s = LEDGERS[name](num_blocks)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    most_kb = next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")
    )
    insert_us, lookup_us, evict_us = (took * 1e6 / num_blocks for took in took_s)
    return Figures(num_blocks, most_kb * 1024 / 1e6, insert_us, lookup_us, evict_us)


def measure(name: str, num_blocks: int) -> Figures:
    """In a process of its own."""
    out = subprocess.run(
        [sys.executable, "-m", "bench.cache_index", "--fill", name, "--blocks", str(num_blocks)],
        cwd=ROOT,
        check=True,
        timeout=1800,
        stdout=subprocess.PIPE,
    )
    return msgspec.json.decode(out.stdout, type=Figures)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cache_index", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_BLOCKS:,} blocks instead of {NUM_BLOCKS:,}"
    )
    parser.add_argument("--fill", choices=LEDGERS, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.fill:
        sys.stdout.write(msgspec.json.encode(fill(options.fill, options.blocks)).decode())
        return
    table = Table(
        title=(
            f"targets: kv/disk_index {MEMORY_TARGET_MB:.0f} MB, all {TIME_TARGET_US:.0f} us a block"
        )
    )
    for title in (
        "ledger",
        "blocks",
        "process, MB",
        "insert us",
        "lookup, use us",
        "evict + insert us",
    ):
        table.add_column(title, justify="left" if title == "ledger" else "right")
    for name in LEDGERS:
        got = measure(name, QUICK_BLOCKS if options.quick else NUM_BLOCKS)
        times = (f"{took_us:.1f}" for took_us in (got.insert_us, got.lookup_us, got.evict_us))
        table.add_row(name, f"{got.num_blocks:,}", f"{got.memory_mb:.0f}", *times)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])

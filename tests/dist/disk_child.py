"""A process that writes blocks to a disk cache until it is killed, and prints which blocks were
acknowledged as durable. It is forked from a warm process (served.py). The kernel kills it when the
test's process ends.

    tests.dist.disk_child FOLDER SEED SHARE_BYTES [LIMIT]

Lines on stdout: `R` when ready, `S n` before n blocks are submitted, `A name...` for acknowledged
blocks, `F n` for n blocks that were not written, `D name...` for evicted names. With LIMIT it exits
normally after LIMIT blocks.
"""

import os
import random
import sys
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np

from hadal.core.cache import split
from hadal.core.messages.pools import StoreBlocks
from hadal.core.plans import BlocksStored
from hadal.runtime.store.disk import DiskStore

FINGERPRINT = "kills"
BLOCK_BYTES = 5000
POOL_BLOCKS = 64
IN_FLIGHT = 4


def content(name: bytes) -> bytes:
    """Return the content of the block with this name."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(name, "little"))).bytes(BLOCK_BYTES)


def say(what: str, *words: object) -> None:
    """Print a line in one write, so that a kill leaves it whole or absent."""
    os.write(1, (" ".join((what, *map(str, words))) + "\n").encode())


def told(stored: BlocksStored, names: list[bytes]) -> int:
    """Print the outcome of a store; return how many blocks were written."""
    assert len(names) == len(stored.locations)
    kept = [
        name.hex()
        for name, location in zip(names, stored.locations, strict=True)
        if location is not None
    ]
    # Evictions are printed first: a kill in between must not leave written blocks acknowledged
    # while the names that they evicted were never printed.
    if stored.dropped:
        say("D", *(name.hex() for name in split(stored.dropped)))
    if kept:
        say("A", *kept)
    if len(kept) < len(names):
        say("F", len(names) - len(kept))
    return len(kept)


def main() -> int:
    folder, seed, share_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limit = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    rng = random.Random(seed)
    pool = np.zeros((POOL_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    store = DiskStore(folder, FINGERPRINT, pool, share_bytes, lambda: None, total_bytes=1 << 40)
    free = list(range(POOL_BLOCKS))
    waiting: dict[int, tuple[list[bytes], list[int]]] = {}
    count, written = 0, 0
    say("R")
    while not limit or written < limit:
        size = rng.randint(1, 8)
        if len(waiting) < rng.randint(1, IN_FLIGHT) and len(free) >= size:
            names = [
                blake2b(f"{seed} {count + i}".encode(), digest_size=16).digest()
                for i in range(size)
            ]
            blocks = [free.pop() for _ in range(size)]
            for name, block in zip(names, blocks, strict=True):
                pool[block] = np.frombuffer(content(name), dtype=np.uint8)
            say("S", size)
            store.submit(StoreBlocks(count, b"".join(names), tuple(range(size)), tuple(blocks)))
            waiting[count] = names, blocks
            count += size
        for stored in store.take():
            assert isinstance(stored, BlocksStored)
            names, blocks = waiting.pop(stored.store_id)
            free += blocks
            written += told(stored, names)
        time.sleep(0.0003)
    store.stop(60.0)
    return 0

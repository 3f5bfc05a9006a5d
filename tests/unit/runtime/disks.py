"""Provide a pool beside a disk cache: named random blocks, and outcomes of reads and writes."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hadal.core.cache import NAME_BYTES, DiskLocation, num_names
from hadal.core.messages.pools import ReadBlocks, StoreBlocks
from hadal.core.plans import BlocksRead, BlocksStored
from hadal.runtime.store.disk import DiskStore
from tests.waiting import DEADLINE_S, wait_until

BLOCK_BYTES = 5000
NUM_BLOCKS = 64
SHARE_BYTES = 8 << 20
LOOK_S = 0.05
"""Polling interval of a host that is not woken: deadlines are checked when outcomes are taken."""


class Host:
    """Stand-in for a unit's host: one pool of random bytes, one store."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str = "model",
        share_bytes: int = SHARE_BYTES,
        **options: Any,
    ):
        rng = np.random.default_rng()
        self.folder = folder
        self.pool = rng.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.woken = threading.Event()
        self.store = DiskStore(
            folder, fingerprint, self.pool, share_bytes, self.woken.set, **options
        )
        self._next_id = 0

    def take(self) -> Any:
        """Wait for the next outcome and return it; there must be exactly one."""

        def found() -> list[Any]:
            self.woken.wait(LOOK_S)
            self.woken.clear()
            return self.store.take()

        (outcome,) = self.store.take() or wait_until(found, "the disk has answered")
        return outcome

    def begin_save(self, names: bytes, block_ids: tuple[int, ...]) -> int:
        self._next_id += 1
        count = num_names(names)
        self.store.submit(StoreBlocks(self._next_id, names, tuple(range(count)), block_ids))
        return self._next_id

    def save(self, names: bytes, block_ids: tuple[int, ...]) -> BlocksStored:
        self.begin_save(names, block_ids)
        done = self.take()
        assert isinstance(done, BlocksStored)
        assert done.store_id == self._next_id
        return done

    def save_again(self, names: bytes, block_ids: tuple[int, ...]) -> tuple[DiskLocation, ...]:
        """Save until all blocks are on disk; return their locations."""

        def saved() -> tuple[DiskLocation, ...]:
            return tuple(filter(None, self.save(names, block_ids).locations))

        count = num_names(names)
        return wait_until(
            lambda: found if len(found := saved()) == count else (), "the disk writes again"
        )

    def begin_load(
        self, names: bytes, locations: tuple[DiskLocation, ...], into: tuple[int, ...]
    ) -> int:
        self._next_id += 1
        self.store.submit(ReadBlocks(self._next_id, names, locations, into))
        return self._next_id

    def load(self, names: bytes, locations: tuple[Any, ...], into: tuple[int, ...]) -> BlocksRead:
        self.begin_load(names, locations, into)
        done = self.take()
        assert isinstance(done, BlocksRead)
        assert done.read_id == self._next_id
        return done

    def stop(self) -> None:
        self.store.stop(DEADLINE_S)


@contextmanager
def host(
    folder: Path, fingerprint: str = "model", share_bytes: int = SHARE_BYTES, **options: Any
) -> Iterator[Host]:
    one = Host(folder, fingerprint, share_bytes, **options)
    try:
        yield one
    finally:
        one.stop()


def new_names(count: int) -> bytes:
    return os.urandom(NAME_BYTES * count)

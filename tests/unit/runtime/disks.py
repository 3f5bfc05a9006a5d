"""A pool beside a disk cache, for tests: named random blocks, and waiting for what comes of
them.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hadal.core.cache import NAME_BYTES, DiskLocation, num_names
from hadal.core.plans import BlocksRead, BlocksStored
from hadal.core.seams import ReadBlocks, StoreBlocks
from hadal.runtime.store.disk import DiskStore

BLOCK_BYTES = 5000
NUM_BLOCKS = 64
SHARE_BYTES = 8 << 20
TIMEOUT_S = 20.0


def wait_for(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """What the condition says as soon as it says anything."""
    until_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.002)
    return found


class Host:
    """Stands where a unit's host stands: one pool, one store. Blocks 1.. hold random bytes."""

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
        self.num_woken = 0
        self.store = DiskStore(folder, fingerprint, self.pool, share_bytes, self._wake, **options)
        self._next_id = 0

    def _wake(self) -> None:
        self.num_woken += 1

    def begin_save(self, names: bytes, block_ids: tuple[int, ...]) -> int:
        self._next_id += 1
        count = num_names(names)
        self.store.submit(StoreBlocks(self._next_id, names, tuple(range(count)), block_ids))
        return self._next_id

    def save(self, names: bytes, block_ids: tuple[int, ...]) -> BlocksStored:
        self.begin_save(names, block_ids)
        (done,) = wait_for(self.store.take)
        assert isinstance(done, BlocksStored)
        assert done.store_id == self._next_id
        return done

    def begin_load(
        self, names: bytes, locations: tuple[DiskLocation, ...], into: tuple[int, ...]
    ) -> int:
        self._next_id += 1
        self.store.submit(ReadBlocks(self._next_id, names, locations, into))
        return self._next_id

    def load(self, names: bytes, locations: tuple[Any, ...], into: tuple[int, ...]) -> BlocksRead:
        self.begin_load(names, locations, into)
        (done,) = wait_for(self.store.take)
        assert isinstance(done, BlocksRead)
        assert done.read_id == self._next_id
        return done

    def stop(self) -> None:
        self.store.stop(TIMEOUT_S)


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

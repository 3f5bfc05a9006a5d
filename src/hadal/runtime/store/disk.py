"""Disk cache of a process with a KV pool: runs ReadBlocks and StoreBlocks effects (core/seams).

Loads and stores have separate threads, so a prompt never waits for writes; the threads copy and
verify. The roles decide which blocks to store and to load. runtime/store/view reports to the roles
all blocks on disk, from any writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hadal.core.config import PREFILL, Deployment, units_of
from hadal.core.messages.pools import ReadBlocks, StoreBlocks
from hadal.core.plans import BlocksRead, BlocksStored
from hadal.runtime.process.process import Run
from hadal.runtime.store.loader import READ_DEADLINE_S, Loader
from hadal.runtime.store.own import OwnBlocks
from hadal.runtime.store.owned_segments import OwnSegments
from hadal.runtime.store.segments import Bytes
from hadal.runtime.store.troubles import Troubles
from hadal.runtime.store.writer import DiskWriter, WriteLimits

PREFILL_PART = 0.6
"""Share of the disk budget for all prefill ranks together. In DeepSeek's figures of one day,
prompts made 266 of 434 billion new tokens, and generated text 168 billion (608 billion tokens in,
56.3 % of them cache hits; source: the inference overview).
"""


class DiskStore:
    """Disk store of one pool, in one folder. All methods are called from the host's thread."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        blocks: Bytes,
        share_bytes: int,
        wake: Callable[[], None],
        *,
        total_bytes: int | None = None,
        read_deadline_s: float = READ_DEADLINE_S,
        limits: WriteLimits | None = None,
    ) -> None:
        """`blocks`: the pool, uint8 [blocks, block_bytes]. `share_bytes`: most bytes that this
        writer keeps on disk. `total_bytes`: most bytes that all writers of its deployment keep
        together.
        """
        self.troubles = Troubles(folder)
        total_bytes = share_bytes if total_bytes is None else total_bytes
        segments = OwnSegments(
            folder, fingerprint, blocks.shape[1], share_bytes, total_bytes, self.troubles
        )
        own = OwnBlocks(segments, self.troubles)
        self._writer = DiskWriter(own, blocks, self.troubles, wake, limits or WriteLimits())
        self._loader = Loader(folder, fingerprint, blocks, self.troubles, wake, read_deadline_s)

    def submit(self, effect: ReadBlocks | StoreBlocks) -> None:
        """Begin a load or a store; `take` returns its outcome."""
        if isinstance(effect, ReadBlocks):
            self._loader.submit(effect)
        else:
            self._writer.submit(effect)

    def take(self) -> list[BlocksRead | BlocksStored]:
        """Return the outcomes that are ready. Call it now and then even if nothing woke the host:
        it checks the deadlines.
        """
        return [*self._loader.take(), *self._writer.take()]

    def stop(self, timeout_s: float) -> None:
        """Write the queued stores, and end; stores that are not written in time are left out."""
        deadline_s = time.monotonic() + timeout_s
        self._writer.stop(deadline_s)
        self._loader.stop(deadline_s)


def make_store(run: Run, role: str, blocks: Bytes, wake: Callable[[], None]) -> DiskStore | None:
    """Make the store for a pool of one of the run's units, with its share of the budget; None if
    the deployment has no disk cache.
    """
    cache = run.deployment.cache
    if not cache.folder:
        return None
    total_bytes = cache.disk_mb * 1024 * 1024
    share_bytes = share_of(run.deployment, role)
    return DiskStore(
        Path(cache.folder), run.fingerprint, blocks, share_bytes, wake, total_bytes=total_bytes
    )


def share_of(deployment: Deployment, role: str) -> int:
    """Return the bytes on disk for one process with a pool, in units of this role."""
    part = PREFILL_PART if role == PREFILL else 1.0 - PREFILL_PART
    units = units_of(deployment, role)
    return int(part * deployment.cache.disk_mb * 1024 * 1024) // (
        deployment.num_units_max(role) * units.ranks
    )

"""The Disk seam, live, of a process with a KV pool: ReadBlocks and StoreBlocks effects, run beside
the steps.

Loads and stores have threads of their own, so a prompt never waits for what others write. They copy
and verify; the roles decide what is worth keeping and loading, and learn from runtime/store/view
what is on disk, whoever wrote it.
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
"""Part of the budget that all prefill ranks have together. In DeepSeek's day prompts left 266 of
434 billion new tokens behind, generated text the others (608 billion in, of which 56.3 % were hit,
and 168 billion out; the inference overview).
"""


class DiskStore:
    """Blocks of one pool to and from one folder. All methods are called from the host's thread."""

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
        """`blocks`: the pool, uint8 [blocks, block_bytes]. `share_bytes`: most that this writer
        keeps on disk; `total_bytes`: most that all writers of its deployment keep together.
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
        """Begin a load or a store; its outcome is among `take`'s."""
        if isinstance(effect, ReadBlocks):
            self._loader.submit(effect)
        else:
            self._writer.submit(effect)

    def take(self) -> list[BlocksRead | BlocksStored]:
        """Return the outcomes that are ready. It is to be called now and then even if nothing woke
        the host, for deadlines are looked at here.
        """
        return [*self._loader.take(), *self._writer.take()]

    def stop(self, timeout_s: float) -> None:
        """Write what waits, and end; what is not written in time is left out."""
        deadline_s = time.monotonic() + timeout_s
        self._writer.stop(deadline_s)
        self._loader.stop(deadline_s)


def make_store(run: Run, role: str, blocks: Bytes, wake: Callable[[], None]) -> DiskStore | None:
    """The store of a pool of one of the run's units, with its share of the budget; None where
    nothing is kept.
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
    """Bytes on disk of one process with a pool, in units of this role."""
    part = PREFILL_PART if role == PREFILL else 1.0 - PREFILL_PART
    units = units_of(deployment, role)
    return int(part * deployment.cache.disk_mb * 1024 * 1024) // (
        deployment.num_units_max(role) * units.ranks
    )

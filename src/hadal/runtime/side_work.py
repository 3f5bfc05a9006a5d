"""Work of a host in parallel to its steps: KV pulls, layers being staged, and the disk cache.

Each kind has its own threads; all methods are called from the host's thread. Does not depend on
roles or steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hadal.core.cache import DiskLocation
from hadal.core.messages.pools import Freed, Pull, ReadBlocks, StoreBlocks
from hadal.core.plans import BlocksRead, BlocksStored, KvPulled, Staged, StagePlan
from hadal.core.seams import DiskNews, Effect, Event, Stage, UsedBlocks
from hadal.runtime.transfer.copier import Copier
from hadal.runtime.transfer.kv import KvWire
from hadal.runtime.transfer.pool import KvPool

log = logging.getLogger(__name__)


class ExpertStager(Protocol):
    """Part of runtime/transfer/stager that a host needs; leaders of several ranks never import it."""

    def submit(self, plan: StagePlan) -> None: ...

    def void(self, formation: int) -> None: ...

    def take(self) -> list[Staged]: ...

    def stop(self, timeout_s: float) -> bool: ...


class BlockDisk(Protocol):
    """Part of runtime/store/disk that a host with a pool and a disk cache needs."""

    def submit(self, effect: ReadBlocks | StoreBlocks) -> None: ...

    def take(self) -> list[BlocksRead | BlocksStored]: ...

    def stop(self, timeout_s: float) -> None: ...


class DiskReader(Protocol):
    """Part of runtime/store/view that a leader's host needs."""

    def take(self) -> list[DiskNews]: ...

    def mark(self, locations: tuple[DiskLocation, ...]) -> None: ...

    def stop(self, timeout_s: float) -> None: ...


Wake = Callable[[], None]


@dataclass(frozen=True)
class SideParts:
    """Parts of a host for work in parallel to steps. Makers get a function that wakes the host."""

    pool: KvPool | None = None
    """KV pool; None: the host's ranks are elsewhere."""
    kv_wire: KvWire | None = None
    """Wire for pulls into the pool; None: only pools of this host can be pulled from."""
    make_stager: Callable[[Wake], ExpertStager] | None = None
    """Maker of the stager; None: the role never stages layers."""
    make_disk: Callable[[Wake], BlockDisk | None] = lambda wake: None
    make_view: Callable[[Wake], DiskReader | None] = lambda wake: None


class SideWork:
    """Executor of a host's effects that do not concern steps."""

    def __init__(self, parts: SideParts, wake: Wake) -> None:
        self._pool = pool = parts.pool
        self._kv_wire = parts.kv_wire or (None if pool is None else KvWire(pool))
        self._copier = (
            None
            if self._kv_wire is None or pool is None
            else Copier(self._kv_wire, pool.block_bytes, wake)
        )
        self._stager = parts.make_stager(wake) if parts.make_stager else None
        self._disk = parts.make_disk(wake)
        self._view = parts.make_view(wake)

    def begin(self, effect: Effect) -> bool:
        """Start an effect; return False if this host has no part for it."""
        if isinstance(effect, Stage) and self._stager:
            self._stager.submit(effect.plan)
        elif isinstance(effect, ReadBlocks | StoreBlocks) and self._disk:
            self._disk.submit(effect)
        elif isinstance(effect, UsedBlocks) and self._view:
            self._view.mark(effect.locations)
        elif isinstance(effect, Freed) and self._pool:
            self._pool.free(effect.block_ids)
        elif isinstance(effect, Pull) and self._copier:
            self._copier.submit(effect)
        else:
            return False
        return True

    def void_stages(self, formation: int) -> None:
        """Abort the staging of formations before this one."""
        if self._stager:
            self._stager.void(formation)

    def take_pulled(self) -> list[KvPulled]:
        """Return the outcomes of finished pulls."""
        return self._copier.take() if self._copier else []

    def take(self) -> list[Event]:
        """Return all outcomes, and the disk's news. Raises the exception of a failed thread."""
        events: list[Event] = [*self.take_pulled()]
        if self._stager:
            events += self._stager.take()
        if self._disk:
            events += self._disk.take()
        if self._view:
            events += self._view.take()
        return events

    def stop(self, timeout_s: float) -> None:
        """End the threads, each within this time."""
        if self._copier:
            self._copier.stop(timeout_s)
        if self._stager and not self._stager.stop(timeout_s):
            log.warning("this process ends while it stages experts")
        if self._disk:
            self._disk.stop(timeout_s)  # Before the pool closes: its threads copy to and from it.
        if self._view:
            self._view.stop(timeout_s)

    def close(self) -> None:
        """Close the KV wire, and release the pool and its shared-memory file."""
        if self._kv_wire:
            self._kv_wire.close()
        if self._pool:
            self._pool.close()

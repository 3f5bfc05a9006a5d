"""Work of a host beside its steps: pulls of KV, layers that are staged, and the disk cache.

Each has threads of its own; all methods are called from the host's thread. Knows no role and no
step.
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
    """The part of runtime/transfer/stager that a host needs; the leader of many ranks is not to
    load it.
    """

    def submit(self, plan: StagePlan) -> None: ...

    def void(self, formation: int) -> None: ...

    def take(self) -> list[Staged]: ...

    def stop(self, timeout_s: float) -> bool: ...


class BlockDisk(Protocol):
    """The part of runtime/store/disk that a host needs, where it has a pool and there is a disk
    cache.
    """

    def submit(self, effect: ReadBlocks | StoreBlocks) -> None: ...

    def take(self) -> list[BlocksRead | BlocksStored]: ...

    def stop(self, timeout_s: float) -> None: ...


class DiskReader(Protocol):
    """The part of runtime/store/view that a leader's host needs."""

    def take(self) -> list[DiskNews]: ...

    def mark(self, locations: tuple[DiskLocation, ...]) -> None: ...

    def stop(self, timeout_s: float) -> None: ...


Wake = Callable[[], None]


@dataclass(frozen=True)
class SideParts:
    """Parts that a host works with beside its steps. Each maker is given what wakes the host."""

    pool: KvPool | None = None
    """None: the host leads ranks elsewhere."""
    kv_wire: KvWire | None = None
    """Pulls into the pool; None: from pools of this host alone."""
    make_stager: Callable[[Wake], ExpertStager] | None = None
    """None: the role never asks for a stage."""
    make_disk: Callable[[Wake], BlockDisk | None] = lambda wake: None
    make_view: Callable[[Wake], DiskReader | None] = lambda wake: None


class SideWork:
    """Runs a host's effects that concern no step."""

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
        """Begin what an effect asks for; False if this host has no part for it."""
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
        """Break off stages of formations before this one."""
        if self._stager:
            self._stager.void(formation)

    def take_pulled(self) -> list[KvPulled]:
        """Return the outcomes of pulls that are ready."""
        return self._copier.take() if self._copier else []

    def take(self) -> list[Event]:
        """Return all outcomes that are ready, and the news of the disk. Raises what broke a thread,
        if anything did.
        """
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
            log.warning("leaving in the middle of a stage")
        if self._disk:
            self._disk.stop(timeout_s)  # Before the pool goes, which it copies to and from.
        if self._view:
            self._view.stop(timeout_s)

    def close(self) -> None:
        """Free the pool and its shared-memory file."""
        if self._kv_wire:
            self._kv_wire.close()
        if self._pool:
            self._pool.close()

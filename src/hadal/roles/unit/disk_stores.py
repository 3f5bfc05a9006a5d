"""Writes to the disk cache, behind the computation: blocks that wait, are being written, or are on
disk.

    offer -> known on disk, or on its way? -> waits -> begin: StoreBlocks -> BlocksStored -> stored
                        '-- too many wait: skipped '-- content gone, or blocks short: skipped

Blocks being written have an owner of their own, so that their content stays. This takes capacity
from requests, so only few blocks are written at a time. Waiting blocks have an owner too if nothing
else keeps them (`holds`): then only few may wait, and they are given up for any request that needs
blocks. Without an owner, a waiting block that was reused meanwhile is skipped. Blocks beyond the
limit of waiting ones are skipped: the disk is behind, and no request waits for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hadal.core import cache
from hadal.core.cache import num_names, split
from hadal.core.errors import InvariantError
from hadal.core.messages.pools import StoreBlocks
from hadal.core.plans import BlocksStored
from hadal.core.seams import DiskNews
from hadal.kv.disk_index import BlockIndex, DiskIndex
from hadal.roles.ranks.pools import RankPools

WRITING_BLOCKS = 64
"""Maximum number of blocks of a rank being written at a time."""
WRITING_SHARE = 8
"""Divisor: at most 1/WRITING_SHARE of a rank's blocks are being written, in case a disk hangs."""
WAITING_BLOCKS = 4096
"""Maximum number of waiting blocks of a rank, if they have no owner (`holds` False)."""
HELD_BLOCKS = 256
"""Maximum number of waiting blocks of a rank with `holds`: enough for a disk pause of 1 or 2 s."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Owner of blocks that are being written together."""

    store_id: int


@dataclass(frozen=True, slots=True)
class Waiter:
    """Owner of a waiting block, if `holds`."""

    name: bytes


Owner = Writer | Waiter


class _Waiting(NamedTuple):
    name: bytes
    position: int
    block: int
    version: int
    """Version of the block; another version means that its content is gone."""


class DiskStores:
    """Disk writes of one unit. `store_id`s are unique while its process lives. `holds`: waiting
    blocks have an owner. `index`: blocks known to be on disk; None: none yet.
    """

    def __init__(
        self, pools: RankPools, *, holds: bool = False, index: BlockIndex | None = None
    ) -> None:
        self.index: BlockIndex = DiskIndex() if index is None else index
        self.counts: Counter[str] = Counter(
            {cache.STORED_BLOCKS: 0, cache.SKIPPED_BLOCKS: 0, cache.DISK_EVICTED_BLOCKS: 0}
        )
        """Counts by the names of core/cache."""
        self._pools = pools
        self._holds = holds
        self._waiting: list[deque[_Waiting]] = [deque() for _ in range(pools.num_ranks)]
        self._writing: dict[int, StoreBlocks] = {}
        self._num_writing = [0] * pools.num_ranks
        self._names: set[bytes] = set()
        """Names of all blocks that wait or are being written."""
        self._num_waiting_max = HELD_BLOCKS if holds else WAITING_BLOCKS
        self._num_writing_max = max(1, min(WRITING_BLOCKS, pools.num_blocks_rank // WRITING_SHARE))
        self._num_begun = 0

    def __contains__(self, name: bytes) -> bool:
        """Return whether a block is on disk, or will be if its write succeeds."""
        return name in self.index or name in self._names

    def __len__(self) -> int:
        return len(self._writing)

    # ---- in ----
    def offer(self, rank: int, name: bytes, position: int, block: int) -> None:
        """Queue a complete block that has an owner. Offer a text's blocks in their order."""
        if name in self:
            return
        waiting = self._waiting[rank]
        if len(waiting) >= self._num_waiting_max:
            self.counts[cache.SKIPPED_BLOCKS] += 1
            return
        self._names.add(name)
        waiting.append(_Waiting(name, position, block, *self._pools[rank].versions((block,))))
        if self._holds:
            self._pools[rank].acquire((block,), Waiter(name), is_use=False)

    def begin(self) -> list[StoreBlocks]:
        """Start the writes that may start now; each becomes an owner of its blocks."""
        effects: list[StoreBlocks] = []
        num_together = max(1, self._num_writing_max // 2)  # One write runs, one waits behind it.
        if not self._names:
            return effects  # Always the case without a disk.
        for rank, waiting in enumerate(self._waiting):
            while waiting and self._num_writing[rank] < self._num_writing_max:
                num_free = self._num_writing_max - self._num_writing[rank]
                effect = self._together(rank, min(num_free, num_together))
                if effect is not None:
                    effects.append(effect)
        return effects

    def _together(self, rank: int, num_most: int) -> StoreBlocks | None:
        waiting, chosen = self._waiting[rank], list[_Waiting]()
        while waiting and len(chosen) < num_most:
            one = waiting.popleft()
            if self._pools[rank].versions((one.block,)) == (one.version,):
                chosen.append(one)
            else:
                self._skip(one)
        if not chosen:
            return None
        effect = StoreBlocks(
            self._num_begun,
            b"".join(one.name for one in chosen),
            tuple(one.position for one in chosen),
            tuple(one.block for one in chosen),
            rank,
        )
        self._num_begun += 1
        self._pools[rank].acquire(effect.block_ids, Writer(effect.store_id), is_use=False)
        self._unhold(rank, chosen)
        self._writing[effect.store_id] = effect
        self._num_writing[rank] += len(chosen)
        return effect

    # ---- out ----
    def note(self, event: BlocksStored | DiskNews) -> None:
        """Note finished writes, or a change of the blocks on disk."""
        if isinstance(event, BlocksStored):
            self.stored(event)
        else:
            self.news(event)

    def news(self, event: DiskNews) -> None:
        """Update the index of blocks on disk."""
        self.index.drop(event.dropped)
        self.index.put(event.added, event.locations)

    def stored(self, event: BlocksStored) -> None:
        """Release blocks after their write, successful or not. Raises InvariantError for a write
        that was not requested, or an answer for another number of blocks.
        """
        effect = self._writing.pop(event.store_id, None)
        if effect is None or len(event.locations) != len(effect.block_ids):
            raise InvariantError(
                f"store {event.store_id} ended with {event.locations}, which does not fit {effect}."
            )
        self._num_writing[effect.rank] -= len(effect.block_ids)
        self._names.difference_update(split(effect.names))
        self._pools.free(effect.rank, effect.block_ids, Writer(event.store_id))
        self.index.drop(event.dropped)
        self.index.put(effect.names, event.locations)
        num_stored = sum(location is not None for location in event.locations)
        self.counts[cache.STORED_BLOCKS] += num_stored
        self.counts[cache.SKIPPED_BLOCKS] += len(effect.block_ids) - num_stored
        self.counts[cache.DISK_EVICTED_BLOCKS] += num_names(event.dropped)

    def give_up(self, rank: int, num_blocks: int) -> int:
        """Give up waiting blocks that have no other owner, oldest first, until that
        frees `num_blocks` blocks. Return the number freed.
        """
        pool, num_free = self._pools[rank], 0
        kept: deque[_Waiting] = deque()
        for one in self._waiting[rank]:
            if self._holds and num_free < num_blocks and pool.num_owners(one.block) == 1:
                self._unhold(rank, (one,))
                self._skip(one)
                num_free += 1
            else:
                kept.append(one)
        self._waiting[rank] = kept
        return num_free

    def lose(self, rank: int) -> None:
        """Forget the writes of a lost rank: none is answered, and its blocks have no owner any more."""
        for effect in [effect for effect in self._writing.values() if effect.rank == rank]:
            del self._writing[effect.store_id]
            self._names.difference_update(split(effect.names))
            self.counts[cache.SKIPPED_BLOCKS] += len(effect.block_ids)
        for one in self._waiting[rank]:
            self._skip(one)
        self._num_writing[rank] = 0
        self._waiting[rank].clear()

    def _unhold(self, rank: int, ones: Sequence[_Waiting]) -> None:
        """Release blocks that no longer wait."""
        if self._holds:
            for one in ones:
                self._pools.free(rank, (one.block,), Waiter(one.name))

    def _skip(self, one: _Waiting) -> None:
        self._names.discard(one.name)
        self.counts[cache.SKIPPED_BLOCKS] += 1

    # ---- views ----
    def owners(self, rank: int) -> list[tuple[Owner, tuple[int, ...]]]:
        """Return the writes and waiting blocks that own blocks of a rank, with these blocks."""
        owners: list[tuple[Owner, tuple[int, ...]]] = [
            (Writer(effect.store_id), effect.block_ids)
            for effect in self._writing.values()
            if effect.rank == rank
        ]
        if self._holds:
            owners += [(Waiter(one.name), (one.block,)) for one in self._waiting[rank]]
        return owners

    def check(self) -> list[str]:
        """Return problems; empty if names and counts match the blocks that wait and are being written."""
        names = [name for effect in self._writing.values() for name in split(effect.names)]
        names += [one.name for waiting in self._waiting for one in waiting]
        problems = []
        if len(names) != len(self._names) or set(names) != self._names:
            problems.append("names differ from the blocks that wait for the disk")
        for rank, num_writing in enumerate(self._num_writing):
            true = sum(
                len(effect.block_ids) for effect in self._writing.values() if effect.rank == rank
            )
            if num_writing != true:
                problems.append(f"rank {rank}: {num_writing} blocks being written are a miscount")
        return problems

"""KV blocks of a unit's ranks: one allocator per rank, the living ranks, and the blocks freed,
named and forgotten since the last report to the host and the front.

Independent of requests: their owner must forget its blocks on a lost rank before the rank's
allocator is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hadal.core.cache import NO_NAME, num_names, split
from hadal.core.messages.pools import Freed, Named
from hadal.core.plans import HeldKv, NamedBlocks
from hadal.core.seams import RankReset
from hadal.kv.blocks import BlockAllocator


class RankPools:
    """Block allocators of a unit's ranks. The only rank of a unit lives from the start; several
    ranks are dead until a RankReset names them fresh.
    """

    def __init__(
        self, num_blocks: int, num_ranks: int = 1, name: str = "", *, reports_names: bool = False
    ) -> None:
        """`num_blocks`: blocks per rank, with the scratch block. `name`: pool name of a unit's only
        rank. `reports_names`: ranks receive the names of their blocks, because they may outlive
        their leader.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; a unit has at least one.")
        self.num_ranks = num_ranks
        self.formation = 0
        self.is_living = [num_ranks == 1] * num_ranks
        self.living = [0] if num_ranks == 1 else []
        """Living ranks, in ascending order."""
        self.names = [name if num_ranks == 1 else ""] * num_ranks
        """Name of each rank's pool memory for other processes, new at every start of the rank."""
        self._unreported: dict[int, list[bytes]] | None = {} if reports_names else None
        """Rank -> names added since `take_named`; None: names are not reported to ranks."""
        self._forgot: set[int] = set()
        """Ranks that must drop all names reported earlier."""
        self._num_blocks = num_blocks
        self._touched: set[int] = set()
        """Ranks with changes since the last `_settle`."""
        self._num_used_R = np.zeros(num_ranks, np.int64)
        self._num_used = 0
        """Sum of `_num_used_R`. `_settle` updates both."""
        self._allocators = [self._allocator(rank) for rank in range(num_ranks)]
        self._freed: dict[int, list[int]] = {}
        self.num_evicted = 0
        """Blocks evicted since the start to make room for others."""
        self._found = FoundNames()

    def __getitem__(self, rank: int) -> BlockAllocator:
        return self._allocators[rank]

    @property
    def num_living(self) -> int:
        return len(self.living)

    @property
    def num_blocks_rank(self) -> int:
        """Usable blocks of a rank, living or not: the most that a request can own."""
        return self._num_blocks - 1

    @property
    def num_blocks_request(self) -> int:
        """Usable blocks of a living rank; 0 if no rank lives."""
        return self.num_blocks_rank if self.living else 0

    @property
    def num_usable(self) -> int:
        """Usable blocks of all living ranks together."""
        return self.num_blocks_rank * self.num_living

    @property
    def num_used_R(self) -> NDArray[np.int64]:
        """Owned blocks of each rank [R]."""
        self._settle()
        return self._num_used_R

    @property
    def num_used(self) -> int:
        self._settle()
        return self._num_used

    @property
    def num_free(self) -> int:
        return self.num_usable - self.num_used

    def free(self, rank: int, block_ids: Sequence[int], owner: Hashable) -> None:
        """Release an owner's blocks. The next `take_freed` reports those without any owner."""
        self._freed.setdefault(rank, []).extend(self._allocators[rank].free(block_ids, owner))

    def forget_names(self, rank: int) -> None:
        """Make all blocks of a rank unfindable by name, owned or not."""
        self._allocators[rank].forget_names()
        if self._unreported is not None:
            self._forgot.add(rank)
            self._unreported.setdefault(rank, [])

    def take_freed(self) -> list[Freed]:
        """Return the blocks freed or evicted since the last call, in one effect per rank.

        They are queued because eviction happens deep inside an allocation. The leader must send
        them before the plan, pull or load that may write these blocks. If they came after it, the
        rank would discard the newly written contents instead of the old ones.
        """
        self._settle()
        effects = [
            Freed(tuple(blocks), rank) for rank, blocks in sorted(self._freed.items()) if blocks
        ]
        self._freed.clear()
        return effects

    def take_named(self) -> list[Named]:
        """Return the blocks named since the last call, in one effect per rank. Send them after
        those of `take_freed`, because a block may have been freed and then named again.
        """
        effects = []
        for rank, names in sorted((self._unreported or {}).items()):
            named = self._allocators[rank].named_as(names)
            if named or rank in self._forgot:
                effects.append(Named(named_blocks(named), rank, rank in self._forgot))
        if self._unreported:
            self._unreported.clear()
        self._forgot.clear()
        return effects

    def _allocator(self, rank: int) -> BlockAllocator:
        return BlockAllocator(self._num_blocks, touched=partial(self._touched.add, rank))

    def _settle(self) -> None:
        """Apply the changes of the allocators. One event changes few allocators of a large unit."""
        if not self._touched:
            return
        for rank in sorted(self._touched):
            self._take_changes(rank)
            self._num_used_R[rank] = self._allocators[rank].num_used
        self._num_used = int(self._num_used_R.sum())
        self._touched.clear()

    def _take_changes(self, rank: int) -> None:
        added, dropped, evicted = self._allocators[rank].take_changes()
        if evicted:
            self._freed.setdefault(rank, []).extend(evicted)
        self.num_evicted += len(evicted)
        if not added and not dropped:
            return
        if added and self._unreported is not None:
            self._unreported.setdefault(rank, []).extend(split(added))
        self._found.change(rank, added, dropped)

    def prefixes(self, chain: bytes) -> dict[int, int]:
        """Return rank -> blocks of the chain's longest prefix in its pool, at the last `_settle`.
        Ranks without one are left out.
        """
        return self._found.prefixes(chain)

    def take_names(self) -> tuple[bytes, bytes]:
        """Return names that became findable since the last call, and names lost on all ranks."""
        return self._found.take_news()

    @property
    def found_names(self) -> bytes:
        """All names that can be found, joined."""
        return self._found.names

    @property
    def num_named(self) -> int:
        """Blocks that can be found, on all ranks."""
        self._settle()
        return self._found.num_named

    def lost(self, event: RankReset) -> list[int]:
        """Return the ranks that lose their KV with this reset. A living rank that is fresh counts:
        its process was replaced without a report of the loss.
        """
        return sorted({*event.lost, *(rank for rank in event.fresh if self.is_living[rank])})

    def reset(self, event: RankReset) -> None:
        """Apply a new formation's living ranks. Lost and fresh ranks begin with empty pools, except
        for `held` blocks: `held_by` owns these, and all other blocks are freed.
        """
        self.formation = event.formation
        for rank in {*event.lost, *event.fresh}:
            self.is_living[rank] = rank in event.fresh
            self._forgot.discard(rank)
            self._allocators[rank].forget_names()
            num_evicted = self.num_evicted
            self._take_changes(rank)
            self.num_evicted = num_evicted  # A lost rank's blocks were not evicted.
            self._allocators[rank] = self._allocator(rank)
            self._freed.pop(rank, None)
            self._num_used_R[rank] = 0
        for rank, held in event.held.items():
            owners = {held_by(rank, kv): kv.block_ids for kv in held.kv}
            self._freed[rank] = list(
                self._allocators[rank].take_over(held.num_freed, owners, names_of(held.named))
            )
            self._num_used_R[rank] = self._allocators[rank].num_used
        self._num_used = int(self._num_used_R.sum())
        self.living = [rank for rank, is_living in enumerate(self.is_living) if is_living]
        for rank, name in enumerate(event.pools):
            self.names[rank] = name

    def check(self) -> list[str]:
        """Return problems; empty when every ledger adds up and dead ranks own nothing."""
        problems = []
        self._settle()
        num_used_R = self._num_used_R.tolist()
        if self._num_used != sum(num_used_R):
            problems.append(f"{num_used_R} used blocks of the ranks are not {self._num_used}")
        for rank, allocator in enumerate(self._allocators):
            if num_used_R[rank] != allocator.num_used:
                problems.append(f"rank {rank}: {num_used_R[rank]} used blocks are a miscount")
            problems += [f"rank {rank}: {problem}" for problem in allocator.check()]
            if not self.is_living[rank] and allocator.num_used:
                problems.append(f"rank {rank} is dead and holds {allocator.num_used} blocks")
        num_named = sum(allocator.num_named for allocator in self._allocators)
        return problems + self._found.check(num_named)

    def check_owners(
        self, rank: int, holders: Iterable[tuple[Hashable, Sequence[int]]]
    ) -> list[str]:
        """Return problems; empty when exactly `holders` own a rank's blocks in its allocator."""
        holders = list(holders)
        if self._allocators[rank].is_owned_as(holders):
            return []
        held: dict[int, list[Hashable]] = {}
        for owner, block_ids in holders:
            for block in block_ids:
                held.setdefault(block, []).append(owner)
        owned = self._allocators[rank].owners()
        wrong = [
            block
            for block in held.keys() | owned.keys()
            if Counter(held.get(block, ())) != Counter(owned.get(block, ()))
        ]
        return [f"rank {rank}: blocks {sorted(wrong)} have wrong owners"] if wrong else []


class FoundNames:
    """Block names that can be found, each with the ranks that have it."""

    def __init__(self) -> None:
        self.num_named = 0
        """Blocks that can be found, on all ranks."""
        self._name_to_ranks: dict[bytes, int] = {}
        """Name -> ranks that have it, as a bit mask."""
        self._changed: dict[bytes, None] = {}
        """Names that a first rank got or the last rank lost since `take_news`."""

    @property
    def names(self) -> bytes:
        return b"".join(self._name_to_ranks)

    def change(self, rank: int, added: bytes, dropped: bytes) -> None:
        """Add and remove names of a rank."""
        self.num_named += num_names(added) - num_names(dropped)
        for name in split(added):
            before = self._name_to_ranks.get(name, 0)
            self._name_to_ranks[name] = before | 1 << rank
            if not before:
                self._changed[name] = None
        for name in split(dropped):
            left = self._name_to_ranks.pop(name) & ~(1 << rank)
            if left:
                self._name_to_ranks[name] = left
            else:
                self._changed[name] = None

    def prefixes(self, chain: bytes) -> dict[int, int]:
        """Return rank -> blocks of the chain's longest prefix that the rank has. Ranks without one
        are left out. Each name costs one look-up, regardless of the number of ranks.
        """
        found: dict[int, int] = {}
        num, left = 0, 0
        for name in split(chain):
            here = self._name_to_ranks.get(name, 0)
            here &= left if num else here
            if here != left:
                found.update(dict.fromkeys(_ranks_of(left & ~here), num))
            left = here
            if not left:
                break
            num += 1
        return found | dict.fromkeys(_ranks_of(left), num)

    def take_news(self) -> tuple[bytes, bytes]:
        """Return names that became findable since the last call, and names lost on all ranks."""
        if not self._changed:
            return b"", b""
        added = b"".join(name for name in self._changed if name in self._name_to_ranks)
        dropped = b"".join(name for name in self._changed if name not in self._name_to_ranks)
        self._changed.clear()
        return added, dropped

    def check(self, num_named: int) -> list[str]:
        """Return problems; empty when the names are those of the ranks' `num_named` blocks."""
        num_reported = sum(ranks.bit_count() for ranks in self._name_to_ranks.values())
        if num_reported == num_named == self.num_named:
            return []
        return [
            f"{num_reported} names to report, {num_named} named blocks and their count"
            f" {self.num_named} differ"
        ]


def named_blocks(block_to_name: Mapping[int, tuple[bytes, bytes]]) -> NamedBlocks:
    """Encode block -> (its name, name of the block before it or b"") for messages."""
    names = b"".join(name for name, _ in block_to_name.values())
    befores = b"".join(before or NO_NAME for _, before in block_to_name.values())
    return NamedBlocks(tuple(block_to_name), names, befores)


def names_of(named: NamedBlocks) -> dict[int, tuple[bytes, bytes]]:
    """Undo `named_blocks`: return block -> (its name, name of the block before it or b"")."""
    befores = (b"" if before == NO_NAME else before for before in split(named.befores))
    return dict(zip(named.block_ids, zip(split(named.names), befores, strict=True), strict=True))


def held_by(rank: int, kv: HeldKv) -> Hashable:
    """Return the owner of an attempt's blocks after a new leader took the rank over, until a
    request continues with that KV.
    """
    return "held", rank, kv.attempt_id


def _ranks_of(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]

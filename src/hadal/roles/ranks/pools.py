"""The KV blocks of a unit's ranks: one allocator each, who lives, and what was freed, named and
forgotten since the host and the front heard of it.

Knows no requests: whoever holds blocks of a lost rank forgets them before the rank's allocator is
replaced.
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
    """Ranks of a unit of several are dead until a RankReset names them fresh; a rank alone is alive
    from the start.
    """

    def __init__(
        self, num_blocks: int, num_ranks: int = 1, name: str = "", *, reports_names: bool = False
    ) -> None:
        """`num_blocks`: of each rank, the scratch block included; `name`: of the pool of a rank
        alone. `reports_names`: ranks hear what is named on them, for they may outlive whoever
        leads them.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; a unit has at least one.")
        self.num_ranks = num_ranks
        self.formation = 0
        self.is_living = [num_ranks == 1] * num_ranks
        self.living = [0] if num_ranks == 1 else []
        """The ranks that live, in their order."""
        self.names = [name if num_ranks == 1 else ""] * num_ranks
        """Name under which others find the memory of each rank's pool. New at every start of the
        rank.
        """
        self._unreported: dict[int, list[bytes]] | None = {} if reports_names else None
        """Names that came to each rank since `take_named`; None: nobody hears of them."""
        self._forgot: set[int] = set()
        """Ranks whose names before those were taken back."""
        self._num_blocks = num_blocks
        self._touched: set[int] = set()
        """Ranks of which something changed since `_settle`."""
        self._num_used_R = np.zeros(num_ranks, np.int64)
        self._num_used = 0
        """Sum of the used blocks by rank, as `_settle` left them."""
        self._allocators = [self._allocator(rank) for rank in range(num_ranks)]
        self._freed: dict[int, list[int]] = {}
        self.num_evicted = 0
        """Blocks that made room for others since the start."""
        self._found = FoundNames()

    def __getitem__(self, rank: int) -> BlockAllocator:
        return self._allocators[rank]

    @property
    def num_living(self) -> int:
        return len(self.living)

    @property
    def num_blocks_rank(self) -> int:
        """Usable blocks of a rank, living or not: what a request can hold at most."""
        return self._num_blocks - 1

    @property
    def num_blocks_request(self) -> int:
        """Usable blocks of the largest living rank; 0 if none lives."""
        return self.num_blocks_rank if self.living else 0

    @property
    def num_usable(self) -> int:
        """Blocks of the living ranks together."""
        return self.num_blocks_rank * self.num_living

    @property
    def num_used_R(self) -> NDArray[np.int64]:
        """Blocks of each rank that somebody owns [R]."""
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
        """Give blocks back; the next `take_freed` says so."""
        self._freed.setdefault(rank, []).extend(self._allocators[rank].free(block_ids, owner))

    def forget_names(self, rank: int) -> None:
        """Let nothing of a rank be found any more, whoever owns it."""
        self._allocators[rank].forget_names()
        if self._unreported is not None:
            self._forgot.add(rank)
            self._unreported.setdefault(rank, [])

    def take_freed(self) -> list[Freed]:
        """Blocks that were freed or evicted since the last call, in one effect for each rank.

        They are kept until they are asked for, because room is made deep inside an allocation: the
        actor puts them before the plan, pull or load that may write these blocks. Behind it, a rank
        would take what was just written there for what was lost.
        """
        self._settle()
        effects = [
            Freed(tuple(blocks), rank) for rank, blocks in sorted(self._freed.items()) if blocks
        ]
        self._freed.clear()
        return effects

    def take_named(self) -> list[Named]:
        """Blocks that can be found since the last call, in one effect for each rank. They have to be
        told after what `take_freed` says: a block that was freed and named again can be found.
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
        """Take in what the allocators changed: few of a large unit's do at one event."""
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
        """rank -> blocks of the longest prefix of the chain that it had at the last `take_freed`;
        no rank without any.
        """
        return self._found.prefixes(chain)

    def take_names(self) -> tuple[bytes, bytes]:
        """Names that can be found since the last call, and names that no longer can, on any
        rank.
        """
        return self._found.take_news()

    @property
    def found_names(self) -> bytes:
        """All that can be found."""
        return self._found.names

    @property
    def num_named(self) -> int:
        """Blocks that can be found, on all ranks."""
        self._settle()
        return self._found.num_named

    def lost(self, event: RankReset) -> list[int]:
        """Ranks whose KV is gone with this reset: a living one that joins anew was lost without a
        word.
        """
        return sorted({*event.lost, *(rank for rank in event.fresh if self.is_living[rank])})

    def reset(self, event: RankReset) -> None:
        """Take in who lives from now on. Ranks lost or fresh begin with empty pools, but for what
        is `held`: that is owned by `held_by`, and all else is freed.
        """
        self.formation = event.formation
        for rank in {*event.lost, *event.fresh}:
            self.is_living[rank] = rank in event.fresh
            self._forgot.discard(rank)
            self._allocators[rank].forget_names()
            num_evicted = self.num_evicted
            self._take_changes(rank)
            self.num_evicted = num_evicted  # Lost is not evicted.
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
        """Problems; empty when every ledger adds up and a dead rank holds nothing."""
        problems = []
        self._settle()
        num_used_R = self._num_used_R.tolist()
        if self._num_used != sum(num_used_R):
            problems.append(f"{num_used_R} blocks of the ranks in use are not {self._num_used}")
        for rank, allocator in enumerate(self._allocators):
            if num_used_R[rank] != allocator.num_used:
                problems.append(f"rank {rank} is said to have {num_used_R[rank]} blocks in use")
            problems += [f"rank {rank}: {problem}" for problem in allocator.check()]
            if not self.is_living[rank] and allocator.num_used:
                problems.append(f"rank {rank} is dead and holds {allocator.num_used} blocks")
        num_named = sum(allocator.num_named for allocator in self._allocators)
        return problems + self._found.check(num_named)

    def check_owners(
        self, rank: int, holders: Iterable[tuple[Hashable, Sequence[int]]]
    ) -> list[str]:
        """Problems; empty when a rank's blocks are owned by those who say that they hold them, and
        by nobody else.
        """
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
        return [f"rank {rank}: blocks {sorted(wrong)} are owned but not held"] if wrong else []


class FoundNames:
    """Names that can be found, and the ranks on which each is."""

    def __init__(self) -> None:
        self.num_named = 0
        """Blocks that can be found, on all ranks."""
        self._name_to_ranks: dict[bytes, int] = {}
        """Name -> its ranks, a bit each."""
        self._changed: dict[bytes, None] = {}
        """Names that came to the first rank or went from the last since `take_news`."""

    @property
    def names(self) -> bytes:
        return b"".join(self._name_to_ranks)

    def change(self, rank: int, added: bytes, dropped: bytes) -> None:
        """Take in the names that a rank got and lost."""
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
        """Return rank -> blocks of the longest prefix of the chain that it has; no rank without any.

        One look at each name, however many ranks have it.
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
        """Return names that can be found since the last call, and names that no longer can, on any
        rank.
        """
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
            f"{num_reported} names are to be reported, and {num_named} blocks have one, not"
            f" {self.num_named}"
        ]


def named_blocks(block_to_name: Mapping[int, tuple[bytes, bytes]]) -> NamedBlocks:
    """Names as they travel: block -> (its name, that of the block before it or nothing)."""
    names = b"".join(name for name, _ in block_to_name.values())
    befores = b"".join(before or NO_NAME for _, before in block_to_name.values())
    return NamedBlocks(tuple(block_to_name), names, befores)


def names_of(named: NamedBlocks) -> dict[int, tuple[bytes, bytes]]:
    """Undo `named_blocks`: block -> (its name, the name before it)."""
    befores = (b"" if before == NO_NAME else before for before in split(named.befores))
    return dict(zip(named.block_ids, zip(split(named.names), befores, strict=True), strict=True))


def held_by(rank: int, kv: HeldKv) -> Hashable:
    """Who owns what a rank has held since an earlier leader led it, until somebody goes on with
    it.
    """
    return "held", rank, kv.attempt_id


def _ranks_of(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]

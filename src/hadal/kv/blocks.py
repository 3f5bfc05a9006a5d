"""The blocks of one rank's KV pool: free blocks, owners, names of contents, and the version of each
block.

    free -- allocate --> owned -- name --> owned and named <-- acquire -- cached
      ^                    |                      |                         ^ |
      +------- free -------+                      +--- free by the last ----+ |
      +--------------------------- evicted, for allocate ---------------------+

A named block is complete and is never written again; any number of owners may read it. When its
last owner frees it, it is cached: it can be found by its name until it is evicted (policy/eviction
chooses). A lookup reaches a block only through the blocks before it in its text, so cached blocks
that a named block follows are evicted only if there are no others.

Block 0 is scratch: padded rows of a batch write there, so it is never allocated.

Prefilled blocks that wait to be copied by a decode rank are under a lease (`Leases`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hadal.core.cache import num_names, slice_of, split
from hadal.core.errors import InvariantError
from hadal.core.messages.base import BLOCK_TOKENS, SCRATCH_BLOCK
from hadal.policy.eviction import Arc, Lru


class _Owners(dict[Hashable, None]):
    """Several owners of a block, in the order of their arrival. A class of its own, to tell it from
    any single owner.
    """


Counts = TypeVar("Counts", int, NDArray[np.int64])


def blocks_for(num_tokens: Counts) -> Counts:
    """Return the number of blocks for `num_tokens` tokens of KV, elementwise for an array."""
    return -(-num_tokens // BLOCK_TOKENS)


def _ignore() -> None:
    """Do nothing: default of `touched`."""


@lru_cache(maxsize=8)
def _all_blocks(num_blocks: int) -> tuple[int, ...]:
    """Return all usable blocks in descending order, so that block 1 is allocated first. One tuple
    is shared by all pools of a size, because a fleet in one process has millions of blocks.
    """
    return tuple(range(num_blocks - 1, SCRATCH_BLOCK, -1))


class BlockAllocator:
    """Allocator of blocks 1 .. num_blocks-1, most recently freed first (it is the likeliest to be
    in a processor's cache).
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: type[Arc | Lru] = Arc,
        touched: Callable[[], object] = _ignore,
    ) -> None:
        """Make a pool of free blocks. `touched` is called whenever owners or names may have changed."""
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; at least 2 are needed, as block 0 is scratch."
            )
        self.num_blocks = num_blocks
        self._free = list(_all_blocks(num_blocks))
        self._version = array("i", bytes(4 * num_blocks))
        self._owners: list[Hashable | _Owners] = [None] * num_blocks
        """Owners of each block; None if it has none. A single owner is stored directly, because
        nearly all blocks have one.
        """
        self._num_owned = 0
        self._name_to_block: dict[bytes, int] = {}
        self._block_to_name: dict[int, tuple[bytes, bytes]] = {}
        """Block -> (its name, name of the block before it in the text; empty at position 0)."""
        self._num_next: dict[bytes, int] = {}
        """Name -> number of named blocks that follow it; absent if none. Kept by name, because the
        block before may be evicted and return.
        """
        self._blocked: dict[int, None] = {}
        """Cached blocks that are followed by named ones: evicted only if there are no others."""
        self._eviction = eviction(self.num_usable)
        self._changes: dict[bytes, bool] = {}
        """Names that were added (True) or removed (False) since `take_changes`."""
        self._evicted: list[int] = []
        self._touched = touched

    @property
    def num_usable(self) -> int:
        """Number of blocks that can be owned: all but the scratch block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: free ones and cached ones."""
        return self.num_usable - self._num_owned

    @property
    def num_used(self) -> int:
        """Number of blocks with an owner."""
        return self._num_owned

    def num_owned(self, blocks: Sequence[int]) -> int:
        """Return the number of these blocks that have an owner."""
        return sum(self._owners[block] is not None for block in blocks)

    @property
    def num_named(self) -> int:
        """Number of blocks that can be found by name, owned or cached."""
        return len(self._name_to_block)

    def allocate(self, count: int, owner: Hashable) -> tuple[int, ...] | None:
        """Return `count` blocks, now owned by `owner`; None if fewer are free. The next
        `take_changes` reports the cached blocks that were evicted for them.
        """
        if count < 0 or owner is None:
            raise ValueError(f"cannot allocate {count} blocks for the owner {owner!r}.")
        if count > self.num_free:
            return None
        self._touched()
        # Fast path, nearly always taken: a request grows by one block.
        if count == 1 and self._free:
            block = self._free.pop()
            self._owners[block] = owner
            self._num_owned += 1
            return (block,)
        blocks = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(blocks) :]
        blocks += [self._evict() for _ in range(count - len(blocks))]
        owners = self._owners
        for block in blocks:
            owners[block] = owner
        self._num_owned += count
        return tuple(blocks)

    def take_over(
        self,
        num_freed: Mapping[int, int],
        owner_to_blocks: Mapping[Hashable, Sequence[int]],
        block_to_name: Mapping[int, tuple[bytes, bytes]] = {},
    ) -> tuple[int, ...]:
        """Continue from an earlier ledger of this pool. `num_freed`: how often each block was
        freed. `block_to_name`: named blocks without an owner -> (name, name of the block before or
        b"").

        All other blocks become free and get a new version, so that a read under a lease of the
        earlier ledger is found void. Returns the free blocks. Raises InvariantError if two owners
        have one block, or if this ledger is in use.
        """
        if self._num_owned or self._block_to_name:
            raise InvariantError("a ledger that is in use cannot take another one over.")
        self._touched()
        for block, number in num_freed.items():
            self._version[block] = number
        for owner, blocks in owner_to_blocks.items():
            self._check_numbers(blocks, owner)
            for block in blocks:
                if self._owners[block] is not None:
                    raise InvariantError(
                        f"{owner!r} takes over block {block}, which {self._owners[block]!r} has."
                    )
                self._owners[block] = owner
                self._num_owned += 1
        self._take_names_over(block_to_name)
        self._free = [
            block
            for block in self._free
            if self._owners[block] is None and block not in self._block_to_name
        ]
        for block in self._free:
            self._version[block] += 1
        return tuple(self._free)

    def _take_names_over(self, block_to_name: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Re-register the names of unowned cached blocks, each at its position in its text."""
        positions = _positions(dict(block_to_name.values()))
        for block, (name, before) in block_to_name.items():
            if self._owners[block] is not None or name in self._name_to_block:
                continue
            self._name_to_block[name] = block
            self._block_to_name[block] = (name, before)
            self._eviction.add(name, positions[name])
            self._change(name, True)
            if before:
                self._num_next[before] = self._num_next.get(before, 0) + 1
        for block in self._block_to_name:
            self._cache(block)

    def acquire(self, blocks: Sequence[int], owner: Hashable, *, is_use: bool = True) -> None:
        """Add `owner` as an owner of blocks that are named or owned. `is_use`: count it as a use
        for eviction.

        Raises InvariantError if one of them is free, or if `owner` owns it already.
        """
        if owner is None:
            raise ValueError("owner is None; it cannot acquire blocks.")
        self._eviction.tick()
        self._touched()
        self._check_numbers(blocks, owner)
        all_owners = self._owners
        for block in blocks:
            names, owners = self._block_to_name.get(block), all_owners[block]
            if isinstance(owners, _Owners):
                if owner in owners:
                    raise InvariantError(
                        f"{owner!r} acquires block {block}, which it owns already."
                    )
                owners[owner] = None
            elif owners is not None:
                if type(owners) is type(owner) and owners == owner:
                    raise InvariantError(
                        f"{owner!r} acquires block {block}, which it owns already."
                    )
                all_owners[block] = _Owners({owners: None, owner: None})
            elif names is not None:
                all_owners[block] = owner
                self._num_owned += 1
                self._blocked.pop(block, None)
                self._eviction.withdraw(names[0])
            else:
                raise InvariantError(f"{owner!r} acquires block {block}, which is free.")
            if names and is_use:
                self._eviction.use(names[0])

    def free(self, blocks: Sequence[int], owner: Hashable) -> tuple[int, ...]:
        """Remove `owner` from blocks. Return the blocks that thereby became free: without another
        owner and without a name.

        Their versions are raised. Raises InvariantError unless `owner` owns every one of them.
        """
        if owner is None:
            raise ValueError("owner is None; it owns no blocks.")
        self._touched()
        self._check_numbers(blocks, owner)
        gone = []
        all_owners, named, version = self._owners, self._block_to_name, self._version
        for block in blocks:
            owners = all_owners[block]
            # Not `!=` alone: comparing a dataclass with a tuple is slow.
            if owners is not owner and (type(owners) is not type(owner) or owners != owner):
                self._leave(block, owner)
                continue
            all_owners[block] = None
            self._num_owned -= 1
            if block in named:
                self._cache(block)
            else:
                version[block] += 1
                gone.append(block)
        self._free += gone
        return tuple(gone)

    def _check_numbers(self, blocks: Sequence[int], owner: Hashable) -> None:
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise InvariantError(
                f"{owner!r} names blocks {min(blocks)} to {max(blocks)}; there are blocks 0 to"
                f" {self.num_blocks - 1}."
            )

    def _owners_of(self, block: int) -> tuple[Hashable, ...]:
        owners = self._owners[block]
        if owners is None:
            return ()
        return tuple(owners) if isinstance(owners, _Owners) else (owners,)

    def _leave(self, block: int, owner: Hashable) -> None:
        """Remove one of a block's several owners."""
        left = self._owners[block]
        if isinstance(left, _Owners) and len(left) == 2:
            first, second = left
            if second is owner:  # With two owners left, the first becomes the single owner again.
                self._owners[block] = first
                return
        if not isinstance(left, _Owners) or owner not in left:
            raise InvariantError(f"{owner!r} frees block {block}, which it does not own.")
        del left[owner]
        if len(left) == 1:
            (self._owners[block],) = left

    def name(self, blocks: Sequence[int], chain: bytes, first: int) -> None:
        """Name complete blocks: they hold the text of `chain` from its block number `first` on.

        A name that another block has already stays with that block. Raises InvariantError if a
        block has no owner or another name, ValueError if the chain is too short.
        """
        if first < 0 or first + len(blocks) > num_names(chain):
            raise ValueError(
                f"blocks {first}..{first + len(blocks) - 1} are not all in a chain of"
                f" {num_names(chain)}."
            )
        self._eviction.tick()
        self._touched()
        before = slice_of(chain, first - 1, first) if first else b""
        for block, position in zip(blocks, range(first, first + len(blocks)), strict=True):
            name = slice_of(chain, position, position + 1)
            if self._owners[block] is None or self._block_to_name.get(block, (name,))[0] != name:
                raise InvariantError(f"block {block} has no owner, or has another name already.")
            other = self._name_to_block.get(name)
            if other is None:
                self._name_to_block[name] = block
                self._block_to_name[block] = (name, before)
                self._eviction.add(name, position)
                self._change(name, True)
                if before:
                    self._follow(before)
            elif other != block:
                # Computed twice at once: a use, because the later request would have used it.
                self._eviction.use(name)
            before = name

    def named_as(self, names: Iterable[bytes]) -> dict[int, tuple[bytes, bytes]]:
        """Return block -> (name, name of the block before or b"") for the names found in the pool."""
        blocks = (self._name_to_block.get(name) for name in names)
        return {block: self._block_to_name[block] for block in blocks if block is not None}

    def lookup(self, chain: bytes) -> tuple[int, ...]:
        """Return the blocks of the longest prefix of the chain that is in the pool, in order."""
        blocks = []
        for name in split(chain):
            block = self._name_to_block.get(name)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def take_changes(self) -> tuple[bytes, bytes, tuple[int, ...]]:
        """Return the names added since the last call, the names removed, and the blocks evicted.

        The versions of evicted blocks were raised here. Copies of the versions elsewhere must be
        updated before anything writes to these blocks.
        """
        if not self._changes and not self._evicted:
            return b"", b"", ()
        added = b"".join(name for name, is_here in self._changes.items() if is_here)
        dropped = b"".join(name for name, is_here in self._changes.items() if not is_here)
        evicted = tuple(self._evicted)
        self._changes.clear()
        self._evicted.clear()
        return added, dropped, evicted

    def forget_names(self) -> None:
        """Remove all names, and free the cached blocks."""
        self._touched()
        for block in [block for block in self._block_to_name if self._owners[block] is None]:
            self._version[block] += 1
            self._evicted.append(block)
            self._free.append(block)
        for name in self._name_to_block:
            self._change(name, False)
        for names in (self._name_to_block, self._block_to_name, self._num_next, self._blocked):
            names.clear()
        self._eviction = type(self._eviction)(self.num_usable)

    def versions(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return each block's version: how often its content was given up. A lease records the
        versions, and a changed one voids the copy.
        """
        return tuple(self._version[block] for block in blocks)

    def num_owners(self, block: int) -> int:
        return len(self._owners_of(block))

    def owners(self) -> dict[int, tuple[Hashable, ...]]:
        """Return every owned block with its owners."""
        return {
            block: self._owners_of(block)
            for block, owners in enumerate(self._owners)
            if owners is not None
        }

    def is_owned_as(self, holders: Sequence[tuple[Hashable, Sequence[int]]]) -> bool:
        """Return True if the blocks' owners are exactly `holders`: distinct owners with distinct
        blocks each, and no others.
        """
        owners, num_held = self._owners, sum(len(blocks) for _, blocks in holders)
        num_more = sum([len(some) - 1 for some in owners if type(some) is _Owners])
        if num_held != self._num_owned + num_more or len({owner for owner, _ in holders}) < len(
            holders
        ):
            return False
        for owner, blocks in holders:
            if len(set(blocks)) < len(blocks):
                return False
            # Counted at once, because nearly all blocks have one owner.
            if [owners[block] for block in blocks].count(owner) < len(blocks) and not all(
                owner in self._owners_of(block) for block in blocks
            ):
                return False
        return True

    def check(self) -> list[str]:
        """Return problems of the ledger; empty if free, cached and owned blocks are disjoint and
        together all blocks.
        """
        problems = []
        free, named = set(self._free), self._block_to_name.keys()
        owned = {block for block, owners in enumerate(self._owners) if owners is not None}
        cached = named - owned
        if len(owned) != self._num_owned:
            problems.append(f"{len(owned)} blocks are owned, not {self._num_owned}")
        if len(free) != len(self._free):
            problems.append("a block is in the free list twice")
        if SCRATCH_BLOCK in free or SCRATCH_BLOCK in named or SCRATCH_BLOCK in owned:
            problems.append("the scratch block was handed out")
        if both := free & owned:
            problems.append(f"blocks {sorted(both)} are free and owned")
        if both := free & named:
            problems.append(f"blocks {sorted(both)} are free and named")
        if any([len(owners) < 2 for owners in self._owners if type(owners) is _Owners]):
            problems.append("a block with less than two owners is recorded as shared")
        if (counts := (len(free), len(cached), len(owned))) and sum(counts) != self.num_usable:
            problems.append(f"{counts} free, cached and owned blocks are not {self.num_usable}")
        return problems + self._check_names(cached)

    def _check_names(self, cached: set[int]) -> list[str]:
        problems = []
        if self._name_to_block != {name: block for block, (name, _) in self._block_to_name.items()}:
            problems.append("names and blocks do not agree")
        num_next: dict[bytes, int] = {}
        for _, before in self._block_to_name.values():
            if before:
                num_next[before] = num_next.get(before, 0) + 1
        if num_next != self._num_next:
            problems.append("the counts of following blocks are wrong")
        blocked = {block for block in cached if self._block_to_name[block][0] in num_next}
        if blocked != self._blocked.keys():
            problems.append("the record of cached blocks that others follow is wrong")
        if len(self._eviction) != len(self._name_to_block) or self._eviction.num_offered != len(
            cached
        ) - len(blocked):
            problems.append("the eviction's blocks are not the named and cached ones")
        return problems

    def _cache(self, block: int) -> None:
        """Offer a named block without owners for eviction, unless named blocks follow it. Called
        after its last owner or the last block that followed it was removed.
        """
        name = self._block_to_name[block][0]
        if name in self._num_next:
            self._blocked[block] = None
        else:
            self._blocked.pop(block, None)
            self._eviction.offer(name)

    def _follow(self, before: bytes) -> None:
        """Record that one more named block follows `before`."""
        self._num_next[before] = self._num_next.get(before, 0) + 1
        block = self._name_to_block.get(before)
        if block is not None and self._owners[block] is None:
            self._eviction.withdraw(before)
            self._blocked[block] = None

    def _evict(self) -> int:
        """Evict a cached block (there must be one), free its name and return the block."""
        name = self._eviction.victim()
        if name is None:
            # All cached blocks left are followed by owned blocks, which were computed at the same
            # time. Those keep their names, which still describe their contents, and can be found
            # again once the block before them is back.
            name = self._block_to_name[next(reversed(self._blocked))][0]
            self._eviction.remove(name)
        block = self._name_to_block.pop(name)
        self._blocked.pop(block, None)
        before = self._block_to_name.pop(block)[1]
        if before:
            self._unfollow(before)
        self._change(name, False)
        self._version[block] += 1
        self._evicted.append(block)
        return block

    def _unfollow(self, before: bytes) -> None:
        self._num_next[before] -= 1
        if not self._num_next[before]:
            del self._num_next[before]
            block = self._name_to_block.get(before)
            if block is not None and self._owners[block] is None:
                self._cache(block)

    def _change(self, name: bytes, is_here: bool) -> None:
        # A name added and removed between two calls of `take_changes` is no change.
        if self._changes.get(name, is_here) == is_here:
            self._changes[name] = is_here
        else:
            del self._changes[name]


def _positions(name_to_before: Mapping[bytes, bytes]) -> dict[bytes, int]:
    """Return each name's position in its chain: the number of given names before it without a gap.
    Visits every name once.
    """
    positions: dict[bytes, int] = {}
    for name in name_to_before:
        chain = [name]
        while (before := name_to_before[chain[-1]]) in name_to_before and chain[
            -1
        ] not in positions:
            chain.append(before)
        last = chain.pop()
        position = positions.setdefault(last, 0)
        for one in reversed(chain):
            position += 1
            positions[one] = position
    return positions

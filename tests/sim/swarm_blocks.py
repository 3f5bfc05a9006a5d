"""Owners of a unit's KV blocks, derived from what its leader receives and returns: plans, pulls,
reads, writes, Freed.

    effect     the first Pull, plan or read that writes a block gives it to a request
    Filled     a block that an ending request has filled passes to the cache
    Freed      a block has no owner from here on
    between    a block has one owner, and is not Freed while a plan, copy, read or write under way uses it

Independent of the leader's ledgers, so an error in one of them, or in their checks, does not hide
here. Slots are counted by requests with written blocks: a rank never has more of them than slots.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Key
from hadal.core.messages.pools import Freed, Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.units import Cancel, Filled, FrontUp, Release, Returned
from hadal.core.plans import (
    BlocksRead,
    BlocksStored,
    Chunk,
    DecodePlan,
    KvPulled,
    PrefillPlan,
    StepDone,
)
from hadal.core.seams import Effect, Event, Execute, RankReset, Send
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.prefill.leader import PrefillLeader

RankBlock = tuple[int, int]
"""(rank, block)."""
KEPT = "kept"
"""Owner of blocks of ended answers, which prefill may copy."""


@dataclass(slots=True)
class _Row:
    """Request in a rank's table."""

    key: Hashable
    block_ids: list[int]


@dataclass(slots=True)
class _UnderWay:
    """Operation that writes blocks, or needs them unchanged, until its outcome is received."""

    rank_blocks: frozenset[RankBlock]
    what: str


@dataclass(slots=True)
class BlockWatch:
    """Block owners in one run of a leader. `keeps_some`: a cache may own blocks."""

    unit: str
    num_slots: int
    """Slots per rank."""
    keeps_some: bool
    seen: Counter[str]
    _holders: dict[RankBlock, Hashable] = field(default_factory=dict)
    _held: Counter[tuple[int, Hashable]] = field(default_factory=Counter)
    """(rank, owner) -> number of the owner's blocks on that rank."""
    _rows: dict[int, dict[int, _Row]] = field(default_factory=dict)
    """Rank -> (slot -> row): a decode unit's tables after the last plan."""
    _prompts: dict[int, dict[str, int]] = field(default_factory=dict)
    """Rank -> (prompt begun there -> step of its last chunk; -1 before it)."""
    _steps: deque[tuple[int, _UnderWay]] = field(default_factory=deque)
    _others: dict[Hashable, _UnderWay] = field(default_factory=dict)
    """Copies, reads and writes under way."""
    _pools: tuple[str, ...] = ()
    """Address of each rank's pool; empty if there is only one."""

    def follow(self, leader: PrefillLeader | DecodeLeader) -> None:
        """Check the leader's events and effects here first, before its own ledgers are checked."""
        handle = leader.handle

        def watched(now_s: float, *events: Event) -> list[Effect]:
            effects = handle(now_s, *events)
            self.take(events, effects)
            return effects

        leader.handle = watched  # type: ignore[method-assign, assignment]

    def take(self, events: Iterable[Event], effects: Iterable[Effect]) -> None:
        """Process the events that the leader received, and the effects that it returned."""
        for event in events:
            self._hear(event)
        for effect in effects:
            self._see(effect)

    @property
    def left(self) -> list[tuple[RankBlock, Hashable]]:
        """Blocks that requests own, with their owners."""
        return [one for one in self._holders.items() if one[1] != KEPT]

    def _hear(self, event: Event) -> None:
        match event:
            case StepDone(step_id):
                number, _ = self._steps.popleft()
                assert number == step_id, (
                    f"{self.unit}: step {step_id} is done before step {number}"
                )
                for rank, prompts in self._prompts.items():
                    self._prompts[rank] = {
                        name: last for name, last in prompts.items() if last != step_id
                    }
            case KvPulled(request_id, attempt, error):
                self._others.pop((KvPulled, (request_id, attempt)), None)
                is_answer = self.unit.startswith("prefill")
                self.seen["answers copied"] += is_answer and error is None
                self.seen["answers gone before they were copied"] += is_answer and error is not None
            case BlocksRead(read_id):
                over = self._others.pop((BlocksRead, read_id), None)
                # The read no longer owns its blocks; any prompt may compute the blocks that failed.
                for rank_block in over.rank_blocks if over is not None else ():
                    self._release(rank_block)
            case BlocksStored(store_id):
                self._others.pop((BlocksStored, store_id), None)
            case Cancel(request_id) | Release(request_id):
                self._forget(request_id)
            case FrontUp():
                self._prompts.clear()
            case RankReset():
                self._pools = event.pools or self._pools
                self._reset({*event.lost, *event.fresh})

    def _reset(self, ranks: set[int]) -> None:
        """Apply a reset: plans are void, tables empty, and the blocks of the given ranks gone."""
        self._steps.clear()
        self._rows.clear()
        for rank in ranks:
            self._prompts.pop(rank, None)
        for rank_block in [rank_block for rank_block in self._holders if rank_block[0] in ranks]:
            self._release(rank_block)
        self._others = {
            name: one
            for name, one in self._others.items()
            if not any(rank in ranks for rank, _ in one.rank_blocks)
        }

    def _see(self, effect: Effect) -> None:
        match effect:
            case Freed(block_ids, rank):
                self._freed({(rank, block) for block in block_ids})
            case Execute(plans):
                rank_blocks = [
                    rank_block
                    for rank, plan in enumerate(plans)
                    for rank_block in self._planned(rank, plan)
                ]
                step_id = plans[0].step_id
                self._steps.append((step_id, _UnderWay(frozenset(rank_blocks), f"step {step_id}")))
            case Pull(request_id, attempt, _, into, rank):
                self._pull((request_id, attempt), rank, into)
            case ReadBlocks(read_id, _, _, into, rank):
                self._begin((BlocksRead, read_id), rank, into, f"read {read_id}")
                self._claim(rank, into, (BlocksRead, read_id))
            case Send(_, Returned(_, request_id)):
                self._forget(request_id)
            case Send(_, Filled(_, request_id, attempt, _, lease)):
                rank = self._pools.index(lease.source) if self._pools else 0
                self._keep((request_id, attempt), rank, lease.block_ids)
            case StoreBlocks(store_id, _, _, block_ids, rank):
                self._begin((BlocksStored, store_id), rank, block_ids, f"write {store_id}")

    def _forget(self, request_id: str) -> None:
        """Drop a prompt that will not be continued; its slot may be freed earlier or later."""
        for prompts in self._prompts.values():
            prompts.pop(request_id, None)

    def _begin(self, name: Hashable, rank: int, block_ids: Iterable[int], what: str) -> None:
        assert name not in self._others, f"{self.unit}: {what} is begun twice"
        self._others[name] = _UnderWay(frozenset((rank, block) for block in block_ids), what)

    # ---- blocks ----
    def _claim(self, rank: int, block_ids: Iterable[int], key: Hashable) -> None:
        for block in block_ids:
            holder = self._holders.get((rank, block))
            if holder is None:
                self._holders[rank, block] = key
                self._held[rank, key] += 1
            else:
                assert holder == key, (
                    f"{self.unit}: rank {rank} gives {holder}'s block {block} to {key}"
                )

    def _keep(self, key: Key, rank: int, block_ids: Iterable[int]) -> None:
        """Mark an answer's blocks as kept: no request may write them before they are Freed. Unchanged
        are blocks that were Freed in the same event, or that another request with the same content
        owns.
        """
        for rank_block in [(rank, block) for block in block_ids]:
            if self._holders.get(rank_block) == key:
                self._release(rank_block)
                self._holders[rank_block] = KEPT

    def _release(self, rank_block: RankBlock) -> None:
        key = self._holders.pop(rank_block, None)
        if key not in (None, KEPT):
            self._held[rank_block[0], key] -= 1

    def _freed(self, rank_blocks: set[RankBlock]) -> None:
        self.seen["blocks freed"] += len(rank_blocks)
        for one in (*(step for _, step in self._steps), *self._others.values()):
            early = rank_blocks & one.rank_blocks
            assert not early, (
                f"{self.unit}: (rank, block) {sorted(early)} are free while {one.what} needs them"
            )
        for rank_block in rank_blocks:
            self._release(rank_block)

    # ---- what is planned ----
    def _pull(self, key: Key, rank: int, into: tuple[int, ...]) -> None:
        """Record a copy from another unit, or from another rank of this one."""
        self._begin((KvPulled, key), rank, into, f"the copy for {key}")
        self._claim(rank, into, key)
        if not self.keeps_some:
            self._count_slots(
                rank, [of for (at, of), num in self._held.items() if at == rank and num]
            )

    def _count_slots(self, rank: int, keys: Collection[Hashable]) -> None:
        self.seen["ranks with every slot taken"] += len(keys) == self.num_slots
        assert len(keys) <= self.num_slots, (
            f"{self.unit}: rank {rank} has {self.num_slots} slots, for {keys}"
        )

    def _planned(self, rank: int, plan: PrefillPlan | DecodePlan) -> Iterable[RankBlock]:
        """Return the blocks that a plan writes or reads."""
        if isinstance(plan, PrefillPlan):
            block_ids = self._chunks(rank, plan.step_id, plan.chunks + plan.second)
        else:
            block_ids = self._table(rank, plan)
        return [(rank, block) for block in block_ids]

    def _chunks(self, rank: int, step_id: int, chunks: tuple[Chunk, ...]) -> Iterable[int]:
        prompts = self._prompts.setdefault(rank, {})
        prompts.update(
            {chunk.request_id: -1 if chunk.sampling is None else step_id for chunk in chunks}
        )
        self._count_slots(rank, prompts)
        for chunk in chunks:
            # Blocks before the chunk may also belong to other requests, which share the prefix.
            first = chunk.start // BLOCK_TOKENS
            self._claim(rank, chunk.block_ids[first:], chunk.request_id)
        return [block for chunk in chunks for block in chunk.block_ids]

    def _table(self, rank: int, plan: DecodePlan) -> Iterable[int]:
        rows = self._rows.setdefault(rank, {})
        for slot in plan.leaves:
            rows.pop(slot, None)
        for join in plan.joins:
            key = self._holders.get((rank, join.block_ids[0]))
            assert key is not None, (
                f"{self.unit}: who joins rank {rank} has a block that was not filled"
            )
            self._claim(rank, join.block_ids, key)
            rows[join.slot] = _Row(key, list(join.block_ids))
            self._only_here(rank, key)
        for slot, _, block in plan.grown:
            self._claim(rank, [block], rows[slot].key)
            rows[slot].block_ids.append(block)
        self._count_slots(rank, rows)
        keys = {row.key for row in rows.values()}
        assert len(keys) == len(rows), f"{self.unit}: a request has two slots of rank {rank}"
        return [block for row in rows.values() for block in row.block_ids]

    def _only_here(self, rank: int, key: Hashable) -> None:
        """Check that a request at a rank has no blocks elsewhere, except of an abandoned copy."""
        if self.keeps_some:
            return
        copy = self._others.get((KvPulled, key))
        for at in {at for at, of in self._held if of == key and self._held[at, of] and at != rank}:
            is_copied = copy is not None and all(one == at for one, _ in copy.rank_blocks)
            assert is_copied, (
                f"{self.unit}: {key} goes on at rank {rank}, and still has blocks of rank {at}"
            )

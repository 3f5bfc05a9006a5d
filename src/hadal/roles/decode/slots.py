"""Slots and blocks of a decode unit's requests, each on one rank, and the choice of requests to
preempt.

While a request moves, `moving` holds a second slot and blocks for it on another rank.

Joins the table of slots with the ranks' allocators, so that both always change together.
Independent of plans and tokens; the caller passes the last plan that was done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain

import numpy as np

from hadal.core.arrays import Ints
from hadal.core.balance import AUTO, OFF, TURNS
from hadal.core.messages.generation import Generation, Key
from hadal.core.messages.units import Decode, KvLease
from hadal.core.plans import Held, KvPulled
from hadal.core.seams import Effect
from hadal.kv.blocks import blocks_for
from hadal.policy.baselines import place_by_counts, place_in_turn
from hadal.policy.decode_balance import Arrival, place
from hadal.policy.decode_moves import MoveTerms, choose_moves, is_uneven
from hadal.policy.preemption import choose_victims
from hadal.policy.views import DecodeRanksView, HolderView
from hadal.roles.decode.answers import AnswerCache, DecodeCache
from hadal.roles.decode.held import DecodeHeld
from hadal.roles.decode.moving import DecodeMoving, ImbalanceLooks
from hadal.roles.decode.table import ARRIVING, DecodeTable, SlotState
from hadal.roles.ranks.pools import RankPools
from hadal.roles.reasons import PREEMPTED, RANK_LOST
from hadal.roles.unit.tokens import returned


class DecodeSlots:
    """Owner of slots and blocks. `out` is the leader's list of effects: requests that must return
    to the front are appended to it.
    """

    def __init__(
        self,
        pools: RankPools,
        slots_per_rank: int,
        max_context: int,
        unit: str,
        out: list[Effect],
        *,
        request_balance: str = AUTO,
        answers: AnswerCache | None = None,
        num_drafts_max: int = 0,
    ) -> None:
        self.per_rank = slots_per_rank
        self.table = DecodeTable(
            pools.num_ranks * slots_per_rank, min(pools.num_blocks_rank, blocks_for(max_context))
        )
        self.key_to_slot: dict[Key, int] = {}
        self.moving = DecodeMoving(
            self.table, pools, slots_per_rank, self.key_to_slot, num_drafts_max
        )
        self.cache = DecodeCache(self.table, pools, slots_per_rank, answers or AnswerCache())
        self._held = DecodeHeld(pools)
        self.is_starved = False
        """True while the next plan waits for blocks; queued requests get no slots meanwhile."""
        self._pools = pools
        self._unit = unit
        self._out = out
        self._num_arrivals = 0
        self._place = place_by_counts if request_balance == OFF else place
        self._is_in_turn = request_balance == TURNS
        self._may_move = request_balance == AUTO and pools.num_ranks > 1
        self._looks = ImbalanceLooks(self.moving)

    def of_rank(self, rank: int) -> slice:
        return slice(rank * self.per_rank, (rank + 1) * self.per_rank)

    # ---- in ----
    def assign(self, waiting: Sequence[Decode]) -> list[int]:
        """Give queued requests slots, and blocks of one rank for all their KV. Return the slots in
        the order of `waiting`; requests at its end may stay queued.
        """
        view = self._view()
        # View only as many requests as there are free slots: the rest of a long queue waits anyway.
        num_slots = int((view.num_requests_max - view.num_requests).sum())
        arrivals = [self._arrival(decode) for decode in waiting[:num_slots]]
        # A rank that runs short of blocks later preempts requests (`_preempt`).
        if self._is_in_turn:
            ranks = place_in_turn(view, arrivals, turn=self._num_arrivals, preempts=True)
        else:
            ranks = self._place(view, arrivals, preempts=True)
        placed = []
        for message, arrival, rank in zip(waiting, arrivals, ranks, strict=False):
            generation, lease = message.generation, message.lease
            key = (generation.request_id, generation.attempt)
            block_ids = self._pools[rank].allocate(arrival.num_blocks, key)
            assert block_ids is not None
            slot = self.table.reserve(
                generation, lease, self._num_arrivals, block_ids, self.of_rank(rank)
            )
            self._num_arrivals += 1
            self.key_to_slot[key] = slot
            placed.append(slot)
        return placed

    def resume(self, generation: Generation) -> bool:
        """Resume an attempt with KV that a rank holds from an earlier leader. Return False without
        that KV or a free slot, or if the attempt runs here already.
        """
        key = (generation.request_id, generation.attempt)
        found = (
            None
            if key in self.key_to_slot or not generation.output
            else self._held.claim(generation)
        )
        if found is None:
            return False
        rank, kv = found
        if not self.num_free_slots(rank):
            self._pools.free(rank, kv.block_ids, key)
            return False
        slot = self.table.resume(generation, kv, self._num_arrivals, self.of_rank(rank))
        self._num_arrivals += 1
        self.key_to_slot[key] = slot
        self.cache.placed(slot)
        self.table.set_lease(slot, KvLease("", (), (), kv.num_pulled))
        return True

    @property
    def held_ids(self) -> tuple[int, ...]:
        """Attempt ids of KV that the ranks hold from an earlier leader."""
        return self._held.attempt_ids

    def hold(self, now_s: float, rank_to_held: Mapping[int, Held]) -> None:
        """Hold the KV of ranks that were taken over until the front resumes it."""
        self._held.take(now_s, rank_to_held)

    def expire_held(self, now_s: float) -> None:
        """Free held KV that the front did not resume in time."""
        self._held.expire(now_s)

    def release_held(self) -> None:
        """Free held KV, because the front resumes no more requests."""
        self._held.release()

    def num_free_slots(self, rank: int) -> int:
        return self.per_rank - int(np.count_nonzero(self.table.state[self.of_rank(rank)]))

    def make_room(self) -> bool:
        """If a slot is free, so that queued requests lack only blocks, drop waiting disk writes on
        all ranks. Return whether that freed blocks.
        """
        living = self._pools.living
        if not any(self.num_free_slots(rank) for rank in living):
            return False
        num_blocks = self._pools.num_usable
        return sum(self.cache.make_room(rank, num_blocks) for rank in living) > 0

    def _view(self) -> DecodeRanksView:
        living = np.array(self._pools.living, np.int64)
        num_taken = np.count_nonzero(self.table.state.reshape(-1, self.per_rank), axis=1)
        return DecodeRanksView(
            ranks=living,
            num_blocks=np.full(living.size, self._pools.num_blocks_rank, np.int64),
            num_blocks_used=self._pools.num_used_R[living],
            num_blocks_worst=np.zeros(living.size, np.int64),
            num_requests=num_taken[living],
            num_requests_max=np.full(living.size, self.per_rank, np.int64),
        )

    def _arrival(self, decode: Decode) -> Arrival:
        generation = decode.generation
        num_known = len(generation.prompt) + len(generation.output)
        # Blocks for the prefilled positions (all but the last token) and for the position that the
        # first step writes.
        num_blocks = blocks_for(num_known)
        num_blocks_worst = blocks_for(len(generation.prompt) + generation.max_tokens - 1)
        return Arrival(num_blocks, max(num_blocks, num_blocks_worst))

    # ---- from rank to rank ----
    def choose_moves(
        self, step_id: int, known: MoveTerms, measured: Callable[[], MoveTerms]
    ) -> list[int]:
        """Choose moves if the ranks are so uneven that moving pays, and reserve blocks at their
        targets. Return the slots that plan `step_id` computes for the last time. `measured` is
        called only if the trigger fires.
        """
        if not self._may_move or not self._looks.is_due(step_id):
            return []
        view = self._view()
        if len(self.moving) or not is_uneven(view, known):
            return []
        now = measured()
        running = self.moving.movable(view.ranks.tolist(), step_id, now)
        return self.moving.reserve(choose_moves(view, running, now, preempts=True), step_id)

    def moved(self, pulled: KvPulled) -> bool:
        """End the copy of a request's KV from rank to rank; return False if none was under way."""
        key = (pulled.request_id, pulled.attempt)
        if key not in self.moving.arriving:
            return False
        self.moving.pulled(key, pulled.error)
        return True

    # ---- out ----
    def end(self, slots: Ints) -> None:
        """Close slots: the last token of their requests was delivered, or the requests were returned."""
        self.table.is_muted[slots] = True
        self.table.state[slots] = SlotState.CLOSING
        for slot in slots.tolist():
            self._out += self.cache.leave(slot, self._unit)
            self.moving.abandon(slot)

    def slots_of(self, attempt_ids: Sequence[int]) -> list[int]:
        """Return the slots of the attempts with these ids, without attempts that are gone."""
        table = self.table
        is_held = np.isin(table.attempt_id, np.array(attempt_ids, np.int64)) & (
            table.state != SlotState.FREE
        )
        return [
            slot
            for slot in np.flatnonzero(is_held).tolist()
            if self.key_to_slot.get(table.occupant(slot).key) == slot
        ]

    def close(self, slot: int, done_step_id: int) -> None:
        """Drop a slot's further tokens, and free it as soon as nothing writes its blocks."""
        self.table.is_muted[slot] = True
        self._let_go(slot, done_step_id)

    def _let_go(self, slot: int, done_step_id: int) -> None:
        if self.table.state[slot] == SlotState.PULLING:
            # The copy still writes its blocks; KvPulled will find the slot muted or preempted.
            return
        self._out += self.cache.leave(slot, self._unit)
        self.moving.abandon(slot)
        self.table.state[slot] = SlotState.CLOSING
        if self.table.last_step_id[slot] <= done_step_id:
            self.vacate(slot)

    def vacate(self, slot: int) -> None:
        """Free a slot and its blocks; return a preempted request to the front."""
        key = self.table.occupant(slot).key
        if self.table.is_preempted[slot] and not self.table.is_muted[slot]:
            self._out.append(returned(self._unit, key, PREEMPTED))
        self._pools.free(slot // self.per_rank, self.table.blocks_of(slot), key)
        self.table.vacate(slot)
        del self.key_to_slot[key]

    def lose(self, rank: int) -> None:
        """Free all slots of a lost rank, and return its requests to the front."""
        first = rank * self.per_rank
        for slot in (first + np.flatnonzero(self.table.state[self.of_rank(rank)])).tolist():
            if self.table.state[slot] in ARRIVING:
                self.moving.lose_target(slot)
                continue
            key = self.table.occupant(slot).key
            if not self.table.is_muted[slot]:
                self._out.append(returned(self._unit, key, RANK_LOST))
            self.table.is_muted[slot] = True
            self.moving.abandon(slot)
            self.vacate(slot)
        self.cache.lose(rank)
        self._held.lose(rank)

    def roll_back(self, num_void: Ints) -> None:
        """Undo the plans in flight: surviving requests join again, and closing slots are freed."""
        self.moving.roll_back()
        self.table.roll_back(num_void)
        for slot in self.table.slots_in(SlotState.CLOSING).tolist():
            self.vacate(slot)
        self.is_starved = False

    # ---- growing ----
    def grow(self, done_step_id: int, num_more: int = 0) -> list[tuple[int, int, int]] | None:
        """Give a block to every slot that needs one for the next plan; return (slot, position in
        its block list, block id) of each, or None if a slot must wait for a block. `num_more`
        further positions, for passes and drafts, get blocks only if enough are free.
        """
        needing = self.table.needing_block(num_more)
        if num_more and self._is_short(needing):
            needing = self.table.needing_block()
        is_short = self._is_short(needing)
        if is_short:
            if len(self.moving):
                self.moving.call_off_into(self._short_ranks(needing))
                needing = self.table.needing_block()
            for rank in np.unique(needing // self.per_rank).tolist():
                of_rank = set(needing[needing // self.per_rank == rank].tolist())
                # Waiting disk writes are dropped before any request is preempted.
                self.cache.make_room(rank, len(of_rank) - self._pools[rank].num_free)
                self._preempt(rank, of_rank, done_step_id)
            needing = self.table.needing_block()
            is_short = self._is_short(needing)
        self.is_starved = is_short
        if is_short:
            return None
        grown = []
        for slot in needing.tolist():
            block_ids = self._pools[slot // self.per_rank].allocate(
                1, self.table.occupant(slot).key
            )
            assert block_ids is not None
            grown.append((slot, self.table.grow(slot, block_ids[0]), block_ids[0]))
        return grown

    def _is_short(self, needing: Ints) -> bool:
        return bool(needing.size) and bool(self._short_ranks(needing))

    def _short_ranks(self, needing: Ints) -> list[int]:
        counts = np.bincount(needing // self.per_rank, minlength=self._pools.num_ranks)
        ranks: list[int] = np.flatnonzero(
            counts > self._pools.num_blocks_rank - self._pools.num_used_R
        ).tolist()
        return ranks

    def _preempt(self, rank: int, needing: set[int], done_step_id: int) -> None:
        """Preempt requests of a rank (policy/preemption) until enough blocks are free, or will be
        when the plans and copies in flight are done.
        """
        table = self.table
        num_missing = len(needing) - self._pools[rank].num_free
        if num_missing <= 0:
            return
        holders, num_blocks_coming = [], 0
        for slot in (
            rank * self.per_rank + np.flatnonzero(table.state[self.of_rank(rank)])
        ).tolist():
            # A preempted slot frees its blocks and needs no further one.
            num_blocks = len(table.block_ids[slot]) + int(slot in needing)
            state = table.state[slot]
            is_closing = (
                state == SlotState.CLOSING or table.is_muted[slot] or table.is_preempted[slot]
            )
            if is_closing or state in ARRIVING or self.moving.is_going(slot):
                num_blocks_coming += len(table.block_ids[slot])
            else:
                occupant = table.occupant(slot)
                holders.append(
                    HolderView(slot, occupant.arrival, num_blocks, occupant.generation.tenant)
                )
        for slot in choose_victims(holders, num_missing - num_blocks_coming):
            # The request owns its blocks until the plans in flight that write them are done. It
            # returns to the front only then, with every token drawn for it: otherwise the retry
            # would compute some again.
            table.is_preempted[slot] = True
            self._let_go(slot, done_step_id)

    def __contains__(self, key: Key) -> bool:
        return key in self.key_to_slot or key in self.moving.arriving

    @property
    def num_requests(self) -> int:
        """Number of requests, including ended ones with an unfinished copy."""
        num_gone = sum(key not in self.key_to_slot for key in self.moving.arriving)
        return len(self.key_to_slot) + num_gone

    def check(self) -> list[str]:
        """Return problems; empty if table, keys and allocators agree."""
        table = self.table
        problems = self._pools.check() + table.check() + self.moving.check() + self.cache.check()
        holders: list[list[tuple[Hashable, Sequence[int]]]] = [
            [*self.cache.owners(rank), *self._held.owners(rank)]
            for rank in range(self._pools.num_ranks)
        ]
        for key, slot in chain(self.key_to_slot.items(), self.moving.arriving.items()):
            holders[slot // self.per_rank].append((key, table.block_ids[slot]))
        for rank, of_rank in enumerate(holders):
            problems += self._pools.check_owners(rank, of_rank)
        placed = {
            occupant.key: slot
            for slot, occupant in enumerate(table.occupants)
            if occupant is not None and table.state[slot] not in ARRIVING
        }
        if placed != self.key_to_slot:
            problems.append("names and slots disagree")
        return problems

"""What the requests of a decode unit hold: a slot and blocks of one rank each, and who has to let
go of them.

While a request moves, `decode_moving` holds as much for it on a second rank.

Joins the table of slots with the ranks' allocators, so that both always change together. Knows no
plans and no tokens; its owner says which plan was done last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hadal.core.balance import AUTO, OFF, TURNS
from hadal.core.messages import Decode, Generation, Key, KvLease
from hadal.core.plans import Held, HeldKv
from hadal.core.seams import Effect, Pull
from hadal.kv.blocks import blocks_for
from hadal.policy.decode_balance import (
    Arrival,
    Move,
    MoveTerms,
    RunningView,
    choose_moves,
    choose_victims,
    is_uneven,
    place,
    place_by_counts,
    place_in_turn,
)
from hadal.policy.views import DecodeRanksView, HolderView
from hadal.roles.decode.answers import AnswerCache, DecodeCache
from hadal.roles.decode.table import ARRIVING, STATE_TO_NAME, DecodeTable, Ints, SlotState
from hadal.roles.ranks.pools import RankPools, held_by
from hadal.roles.reasons import PREEMPTED, RANK_LOST
from hadal.roles.unit.unit import given_back

# KV that a decode unit's ranks hold since another leader led them, until the front says which of
# it goes on.
#
#     RankReset: held --> UnitUp names the attempts ... Resume: some go on from the last token
#     delivered, the rest is freed
#
# A front that says nothing for HELD_S has nothing to say. Knows no slots.


HELD_S = 10.0


class DecodeHeld:
    """Owns the blocks of what is held."""

    def __init__(self, pools: RankPools) -> None:
        self._pools = pools
        self._by_rank: dict[int, dict[int, HeldKv]] = {}
        """rank -> attempt id -> its KV there. One that was moving may lie on two ranks."""
        self._until_s = math.inf

    @property
    def attempt_ids(self) -> tuple[int, ...]:
        return tuple(
            sorted({attempt_id for of_rank in self._by_rank.values() for attempt_id in of_rank})
        )

    def take(self, now_s: float, rank_to_held: Mapping[int, Held]) -> None:
        """These ranks were taken over; the pools own their KV for it already."""
        for rank, held in rank_to_held.items():
            self._by_rank[rank] = {kv.attempt_id: kv for kv in held.kv}
            self._until_s = now_s + HELD_S

    def lose(self, rank: int) -> None:
        """The rank is gone."""
        for kv in self._by_rank.pop(rank, {}).values():
            self._free(rank, kv)

    def release(self) -> None:
        """Nobody goes on with what is left."""
        for rank in list(self._by_rank):
            self.lose(rank)
        self._until_s = math.inf

    def expire(self, now_s: float) -> None:
        if now_s >= self._until_s:
            self.release()

    def claim(self, generation: Generation) -> tuple[int, HeldKv] | None:
        """Hand over an attempt's KV, if all of it that its next step reads is there: (rank, KV),
        its blocks now the attempt's own.
        """
        num_tokens = len(generation.prompt) + len(generation.output) - 1
        for rank, of_rank in self._by_rank.items():
            kv = of_rank.get(generation.attempt_id)
            if (
                kv is None
                or kv.num_tokens < num_tokens
                or len(kv.block_ids) < blocks_for(num_tokens)
            ):
                continue
            del of_rank[generation.attempt_id]
            key: Key = (generation.request_id, generation.attempt)
            # Owned by the attempt before they are let go of here: a block that is nobody's is free,
            # and ranks are told to forget it.
            self._pools[rank].acquire(kv.block_ids, key)
            self._free(rank, kv)
            return rank, kv
        return None

    def owners(self, rank: int) -> Iterator[tuple[Hashable, Sequence[int]]]:
        """Who owns which of a rank's blocks, as the pools know it."""
        return ((held_by(rank, kv), kv.block_ids) for kv in self._by_rank.get(rank, {}).values())

    def _free(self, rank: int, kv: HeldKv) -> None:
        self._pools.free(rank, kv.block_ids, held_by(rank, kv))


# Requests that change their rank while they run: who is on the way, and what both ranks hold for
# them meanwhile.
#
#     plan s      | computed at the source for the last time; the plan publishes it |
#     s is done   |   room at the target, taken when the move was decided: Pull     |   plans s+1 and s+2 go without it
#     KvPulled    |   the source is freed, the target joins the next plan           |   s+3, or s+4 at the latest
#
# A copy that is not there when plan s+4 is made is called off: the request goes on at its source,
# whose KV nobody touched. So it never stands still for more than STALL_STEPS_MAX steps. Where the
# copy writes stays taken until it ended.
#
# A request owns its source until its KV is at the target, so whatever ends it ends it there. Knows
# the table and the allocators, neither plans nor messages.


STALL_STEPS_MAX = 3
"""Two plans are made before any copy can have ended; one more gives it the time of another step."""
_NUM_MORE = 2
"""Positions that a request's first blocks at its target hold beside those written when its move is
decided: the one of its last plan at the source, drafts aside, and the one of its first at the
target.
"""


@dataclass(slots=True)
class _Trip:
    """One request on its way."""

    key: Key
    source: int
    step_id: int
    """The last plan that computes it at the source."""
    target: int | None
    """None: called off; it goes on at the source once that plan is done."""
    lease: KvLease | None = None
    """Under which the copy runs; None: it has not begun."""


class DecodeMoving:
    """Slots are the unit's. `key_to_slot` is the owner's: where each request is."""

    def __init__(
        self,
        table: DecodeTable,
        pools: RankPools,
        per_rank: int,
        key_to_slot: dict[Key, int],
        num_drafts_max: int,
    ) -> None:
        self.arriving: dict[Key, int] = {}
        """RESERVED and FILLING slots by the request whose KV comes there, also if it does not need
        it any more.
        """
        self.num_moved = 0
        self.num_called_off = 0
        """Moves that ended where they began, for whatever reason but the request's own end."""
        self.stalls: Counter[int] = Counter()
        """Steps that requests stood still -> how often, moved or called off."""
        self._table = table
        self._pools = pools
        self._per_rank = per_rank
        self._key_to_slot = key_to_slot
        self._num_more = _NUM_MORE + num_drafts_max
        self._trips: dict[int, _Trip] = {}
        """Source slot -> the move from there."""

    def __len__(self) -> int:
        return len(self._trips)

    # ---- which may move ----
    def movable(self, rows: Sequence[int], next_step_id: int, terms: MoveTerms) -> RunningView:
        """What a request of each rank (`rows`) and slot would take elsewhere after the next plan
        has computed it.
        """
        table, shape = self._table, (-1, self._per_rank)
        # A plan publishes the KV of what moves, and has to compute it.
        may_move = (table.state == SlotState.ACTIVE) & ~table.rests
        may_move &= ~table.is_muted & ~table.is_preempted
        may_move &= table.max_tokens - table.output_index >= terms.num_tokens_left_min
        may_move &= next_step_id - table.moved_step_id >= terms.gain_steps
        for key in (
            self.arriving
        ):  # A copy of it still runs, and there is only one of a request at a time.
            if key in self._key_to_slot:
                may_move[self._key_to_slot[key]] = False
        slots = np.flatnonzero(may_move)
        num_blocks, num_blocks_worst = (
            np.zeros(table.num_slots, np.int64),
            np.zeros(table.num_slots, np.int64),
        )
        num_blocks[slots] = blocks_for(self._num_written(slots))
        num_blocks_worst[slots] = np.maximum(
            num_blocks[slots],
            blocks_for(table.length[slots] - table.output_index[slots] + table.max_tokens[slots]),
        )
        return RunningView(
            num_blocks.reshape(shape)[list(rows)], num_blocks_worst.reshape(shape)[list(rows)]
        )

    def _num_written(self, slots: Ints | int) -> Ints:
        """Positions that these slots' requests may need at once at their targets."""
        written: Ints = self._table.length[slots] + self._table.num_unsure[slots]
        return written + self._num_more

    # ---- a move's life ----
    def reserve(self, moves: Sequence[Move], step_id: int) -> list[int]:
        """Take the room that chosen moves need and return their slots; plan `step_id` is the last
        to compute them.
        """
        table, sources = self._table, []
        for move in moves:
            source = move.from_rank * self._per_rank + move.slot
            key = table.occupant(source).key
            num_blocks = blocks_for(int(self._num_written(source)))
            block_ids = self._pools[move.to_rank].allocate(num_blocks, key)
            assert block_ids is not None, "a move was chosen to where it does not fit"
            table.moved_step_id[source] = step_id
            among = slice(move.to_rank * self._per_rank, (move.to_rank + 1) * self._per_rank)
            target = self.arriving[key] = table.reserve_for(source, block_ids, among)
            self._trips[source] = _Trip(key, source, step_id, target)
            sources.append(source)
        return sources

    def depart(self, sources: Sequence[int]) -> None:
        """The plan that computes them for the last time is made."""
        for source in sources:
            self._table.state[source] = SlotState.MOVING
            self._table.left_step_id[source] = self._trips[source].step_id

    def done(self, done_step_id: int) -> list[Pull]:
        """A plan was done: begin to copy what it computed for the last time."""
        pulls, table = [], self._table
        for trip in list(self._trips.values()):
            if trip.lease is not None or trip.step_id > done_step_id:
                continue
            if trip.target is None:
                self._go_on(trip)
                continue
            num_tokens, rank = int(table.length[trip.source]), trip.source // self._per_rank
            block_ids = table.blocks_of(trip.source)[: blocks_for(num_tokens)]
            versions = self._pools[rank].versions(block_ids)
            trip.lease = KvLease(self._pools.names[rank], block_ids, versions, num_tokens)
            table.state[trip.target] = SlotState.FILLING
            into = table.blocks_of(trip.target)[: len(block_ids)]
            pulls.append(Pull(*trip.key, trip.lease, into, trip.target // self._per_rank))
        return pulls

    def pulled(self, key: Key, error: str | None) -> None:
        """A copy ended: its request goes on at the target, or at the source as if nothing had been
        tried.
        """
        target = self.arriving.pop(key)
        trip = self._trips.get(self._key_to_slot.get(key, -1))
        is_meant = trip is not None and trip.target == target
        if trip is None or not is_meant or error is not None:
            self._free(target, key)
            if trip is not None and is_meant:
                self._go_on(trip)
            return
        assert trip.lease is not None
        del self._trips[trip.source]
        self._table.go_on_at(trip.source, target, trip.lease)
        self._key_to_slot[key] = target
        self._free(trip.source, key)
        self.num_moved += 1

    def call_off_late(self, next_step_id: int) -> None:
        """Let those go on at their source that have stood still for as long as they may."""
        for trip in list(self._trips.values()):
            if trip.lease is not None and next_step_id - trip.step_id - 1 >= STALL_STEPS_MAX:
                self.call_off(trip.source)

    def call_off_into(self, ranks: Sequence[int]) -> None:
        """These ranks are short of blocks: nobody moves there."""
        for trip in list(self._trips.values()):
            if trip.target is not None and trip.target // self._per_rank in ranks:
                self.call_off(trip.source)

    def call_off(self, source: int) -> None:
        """The request goes on where it is."""
        trip, table = self._trips[source], self._table
        self._let_target_go(trip)
        if trip.lease is not None:
            self._go_on(trip)
        elif table.is_in_runner[source]:  # No plan was made without it.
            self._go_on(trip)
            table.state[source], table.left_step_id[source] = SlotState.ACTIVE, -1

    def joined(self, slots: Sequence[int], step_id: int) -> None:
        """These are computed from this plan on."""
        for slot in slots:
            left = int(self._table.left_step_id[slot])
            if left >= 0:
                self.stalls[step_id - left - 1] += 1
                self._table.left_step_id[slot] = -1

    # ---- what ends one ----
    def abandon(self, source: int) -> None:
        """The request ends at its source, or leaves from there; nothing happens if it does not
        move.
        """
        trip = self._trips.pop(source, None)
        if trip is not None:
            self._let_target_go(trip)

    def lose_target(self, slot: int) -> None:
        """The rank of a RESERVED or FILLING slot is gone; no copy to it will end."""
        key = self._table.occupant(slot).key
        trip = self._trips.get(self._key_to_slot.get(key, -1))
        del self.arriving[key]
        self._free(slot, key)
        if trip is not None and trip.target == slot:
            trip.target = None
            if trip.lease is not None:
                self._go_on(trip)

    def roll_back(self) -> None:
        """The plans in flight are void: who has not left yet stays. Copies go on, for ranks that
        live keep their KV.
        """
        for trip in list(self._trips.values()):
            if trip.lease is None:
                self._let_target_go(trip)
                self._go_on(trip)
                self._table.state[trip.source] = (
                    SlotState.ACTIVE
                )  # As the void plans have it; the table undoes them.

    def in_flight(self) -> list[int]:
        """Sources that a plan in flight computes, or should have: a failed step makes their KV
        unknown.
        """
        return [trip.source for trip in self._trips.values() if trip.lease is None]

    def is_going(self, source: int) -> bool:
        """Whether its blocks come free when the copy ends well."""
        trip = self._trips.get(source)
        return trip is not None and trip.target is not None

    def _go_on(self, trip: _Trip) -> None:
        del self._trips[trip.source]
        self._table.state[trip.source] = SlotState.READY
        self.num_called_off += 1

    def _let_target_go(self, trip: _Trip) -> None:
        if trip.target is not None and trip.lease is None:
            del self.arriving[trip.key]
            self._free(trip.target, trip.key)
        trip.target = None

    def _free(self, slot: int, key: Key) -> None:
        self._pools.free(slot // self._per_rank, self._table.blocks_of(slot), key)
        self._table.vacate(slot)

    def check(self) -> list[str]:
        """Problems; empty when trips, states and names agree, on both sides."""
        table, problems = self._table, []
        if set(table.slots_in(SlotState.MOVING).tolist()) != self._trips.keys():
            problems.append(f"slots {sorted(self._trips)} are on their way, and others are MOVING")
        if set(table.slots_in(*ARRIVING).tolist()) != set(self.arriving.values()):
            problems.append(
                f"slots {sorted(self.arriving.values())} are awaited, and others RESERVED or"
                " FILLING"
            )
        awaited = {trip.target for trip in self._trips.values()}
        for slot in table.slots_in(SlotState.RESERVED).tolist():
            if slot not in awaited:
                problems.append(f"slot {slot} is reserved for nobody")
        for trip in self._trips.values():
            if self._key_to_slot.get(trip.key) != trip.source:
                problems.append(f"{trip.key} moves from slot {trip.source} and is not there")
            if trip.target is None:
                continue
            state = SlotState.RESERVED if trip.lease is None else SlotState.FILLING
            if self.arriving.get(trip.key) != trip.target or table.state[trip.target] != state:
                problems.append(
                    f"{trip.key} moves to slot {trip.target}, which is not {STATE_TO_NAME[state]}"
                    " for it"
                )
            if trip.target // self._per_rank == trip.source // self._per_rank:
                problems.append(f"{trip.key} moves from its rank to its rank")
        return problems


LOOK_STEPS = 8
"""Plans from one look at the imbalance to the next; more and more while moves fail, up to the
second.
"""
LOOK_STEPS_MAX = 512


class DecodeSlots:
    """`out` is the leader's list of effects: a request that has to go to the front again is appended
    to it.
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
        self.held = DecodeHeld(pools)
        self.is_starved = False
        """The next plan waits for blocks: nobody gets a slot before it has them."""
        self._pools = pools
        self._unit = unit
        self._out = out
        self._num_arrivals = 0
        self._place = place_by_counts if request_balance == OFF else place
        self._is_in_turn = request_balance == TURNS
        self._may_move = request_balance == AUTO and pools.num_ranks > 1
        self._look_step_id = 0
        """The next plan before which the imbalance is looked at."""
        self._look_steps = LOOK_STEPS
        self._num_moves_seen = (0, 0)
        """Moved and called off, at the last look."""

    def of_rank(self, rank: int) -> slice:
        return slice(rank * self.per_rank, (rank + 1) * self.per_rank)

    # ---- in ----
    def assign(self, waiting: Sequence[Decode]) -> list[int]:
        """Give those who wait slots, and blocks of a rank for all their KV. Returns the slots, in
        their order; the others, behind the end of the list, have to wait on.
        """
        view = self._view()
        # No more than there are free slots: most of a long queue waits anyway.
        num_slots = int((view.num_requests_max - view.num_requests).sum())
        arrivals = [self._arrival(decode) for decode in waiting[:num_slots]]
        # A rank that runs short lets its latest arrived go (`_preempt`).
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
        """Go on with an attempt whose KV a rank has held since another leader led it; False if it
        is not all there.
        """
        key = (generation.request_id, generation.attempt)
        found = (
            None
            if key in self.key_to_slot or not generation.output
            else self.held.claim(generation)
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

    def num_free_slots(self, rank: int) -> int:
        return self.per_rank - int(np.count_nonzero(self.table.state[self.of_rank(rank)]))

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
        # All that is prefilled, which the last token is not yet, and the position that the first
        # step writes.
        num_blocks = blocks_for(num_known)
        num_blocks_worst = blocks_for(len(generation.prompt) + generation.max_tokens - 1)
        return Arrival(num_blocks, max(num_blocks, num_blocks_worst))

    # ---- from rank to rank ----
    def choose_moves(
        self, step_id: int, known: MoveTerms, measured: Callable[[], MoveTerms]
    ) -> list[int]:
        """Look whether the ranks are so uneven that moving pays. Returns the slots that plan
        `step_id` is to compute for the last time; room for them is taken elsewhere. `measured` is
        asked only if the trigger says so.
        """
        if not self._may_move or step_id < self._look_step_id:
            return []
        seen = self.moving.num_moved, self.moving.num_called_off
        if seen[0] > self._num_moves_seen[0]:
            self._look_steps = LOOK_STEPS
        elif (
            seen[1] > self._num_moves_seen[1]
        ):  # Copies take too long for these steps, or fail: try seldom.
            self._look_steps = min(2 * self._look_steps, LOOK_STEPS_MAX)
        self._num_moves_seen = seen
        self._look_step_id = step_id + self._look_steps
        view = self._view()
        if len(self.moving) or not is_uneven(view, known):
            return []
        now = measured()
        running = self.moving.movable(view.ranks.tolist(), step_id, now)
        return self.moving.reserve(choose_moves(view, running, now, preempts=True), step_id)

    # ---- out ----
    def end(self, slots: Ints) -> None:
        """The last token that these requests get was delivered, or given back."""
        self.table.is_muted[slots] = True
        self.table.state[slots] = SlotState.CLOSING
        for slot in slots.tolist():
            self._out += self.cache.leave(slot, self._unit)
            self.moving.abandon(slot)

    def slots_of(self, attempt_ids: Sequence[int]) -> list[int]:
        """Where the attempts with these ids are; those that are not here any more are left
        out.
        """
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
        """Nobody wants this slot's tokens any more; free it as soon as nothing writes its
        blocks.
        """
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
        """Free a slot and its blocks; a preempted request goes back to the front."""
        key = self.table.occupant(slot).key
        if self.table.is_preempted[slot] and not self.table.is_muted[slot]:
            self._out.append(given_back(self._unit, key, PREEMPTED))
        self._pools.free(slot // self.per_rank, self.table.blocks_of(slot), key)
        self.table.vacate(slot)
        del self.key_to_slot[key]

    def lose(self, rank: int) -> None:
        """The rank is gone with all that was on it: its requests go back to the front."""
        first = rank * self.per_rank
        for slot in (first + np.flatnonzero(self.table.state[self.of_rank(rank)])).tolist():
            if self.table.state[slot] in ARRIVING:
                self.moving.lose_target(slot)
                continue
            key = self.table.occupant(slot).key
            if not self.table.is_muted[slot]:
                self._out.append(given_back(self._unit, key, RANK_LOST))
            self.table.is_muted[slot] = True
            self.moving.abandon(slot)
            self.vacate(slot)
        self.cache.stores.lose(rank)
        self.held.lose(rank)

    def roll_back(self, num_void: Ints) -> None:
        """No plan in flight will be done: survivors join again, and what was only waiting to leave
        is freed.
        """
        self.moving.roll_back()
        self.table.roll_back(num_void)
        for slot in self.table.slots_in(SlotState.CLOSING).tolist():
            self.vacate(slot)
        self.is_starved = False

    # ---- growing ----
    def grow(self, done_step_id: int, num_more: int = 0) -> list[tuple[int, int, int]] | None:
        """Give a block to every slot that needs one for the next plan; None if one of them has to
        wait for it. For so many positions more, of further passes and drafts, where there are blocks to
        spare.
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
                # Blocks that wait to be written to disk cost no request its place.
                self.cache.stores.give_up(rank, len(of_rank) - self._pools[rank].num_free)
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
        """Let a rank's latest arrived go until enough blocks are free or will be, when what is in
        flight is done.
        """
        table = self.table
        num_missing = len(needing) - self._pools[rank].num_free
        if num_missing <= 0:
            return
        holders, num_blocks_coming = [], 0
        for slot in (
            rank * self.per_rank + np.flatnonzero(table.state[self.of_rank(rank)])
        ).tolist():
            # One that goes asks for no block any more.
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
            # It owns its blocks until the plans in flight that write them are done, and goes back to
            # the front only then: with every token that was drawn for it, or the retry would compute
            # some of them again.
            table.is_preempted[slot] = True
            self._let_go(slot, done_step_id)

    def check(self) -> list[str]:
        """Problems; empty when table, names and allocators agree."""
        table = self.table
        problems = (
            self._pools.check() + table.check() + self.moving.check() + self.cache.stores.check()
        )
        holders: list[list[tuple[Hashable, Sequence[int]]]] = [
            [*self.cache.stores.owners(rank), *self.held.owners(rank)]
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

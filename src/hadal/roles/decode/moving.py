"""Requests that move to another rank while they run, and the memory reserved for them on both
ranks.

    plan s      | computed at the source for the last time; the plan publishes it |
    s is done   |   Pull, into blocks reserved at the target with the decision    |   not in plans s+1, s+2
    KvPulled    |   the source is freed, the target joins the next plan           |   in s+3, at latest s+4

If the copy is not finished when plan s+4 is made, the move is called off: the request continues at
its source, with untouched KV. So it rests for at most STALL_STEPS_MAX steps. The blocks that the
copy writes stay reserved until the copy has ended.

A request owns its source slot until its KV is at the target, so a request that ends earlier ends at
its source. Depends on the table and the allocators; independent of plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hadal.core.arrays import Ints
from hadal.core.messages.generation import Key
from hadal.core.messages.pools import Pull
from hadal.core.messages.units import KvLease
from hadal.kv.blocks import blocks_for
from hadal.policy.decode_moves import Move, MoveTerms, RunningView
from hadal.roles.decode.table import ARRIVING, STATE_TO_NAME, DecodeTable, SlotState
from hadal.roles.ranks.pools import RankPools

STALL_STEPS_MAX = 3
"""Maximum number of steps that a moving request rests. Two plans are made before any copy can have
ended; a third gives the copy the time of another step.
"""
_NUM_MORE = 2
"""Positions reserved at the target beyond those written when the move is decided: one for the last
plan at the source, drafts aside, and one for the first at the target.
"""
LOOK_STEPS = 8
"""Plans between two checks of the imbalance; doubled while moves fail, up to LOOK_STEPS_MAX."""
LOOK_STEPS_MAX = 512


@dataclass(slots=True)
class Trip:
    """One request that moves."""

    key: Key
    source: int
    step_id: int
    """Last plan that computes the request at its source."""
    target: int | None
    """Target slot. None: called off; the request continues at its source once plan `step_id` is done."""
    lease: KvLease | None = None
    """Lease of the copy; None if the copy has not begun."""


class DecodeMoving:
    """Moves between ranks. Slot numbers are the unit's; DecodeSlots shares `key_to_slot`."""

    def __init__(
        self,
        table: DecodeTable,
        pools: RankPools,
        per_rank: int,
        key_to_slot: dict[Key, int],
        num_drafts_max: int,
    ) -> None:
        self.arriving: dict[Key, int] = {}
        """Request -> RESERVED or FILLING slot for its KV, even if the request no longer needs it."""
        self.num_moved = 0
        self.num_called_off = 0
        """Moves that ended at their source, for any reason but the request's end."""
        self.stalls: Counter[int] = Counter()
        """Steps that a request rested for a move -> number of moves, called-off ones included."""
        self._table = table
        self._pools = pools
        self._per_rank = per_rank
        self._key_to_slot = key_to_slot
        self._num_more = _NUM_MORE + num_drafts_max
        self._trips: dict[int, Trip] = {}
        """Source slot -> move from there."""

    def __len__(self) -> int:
        return len(self._trips)

    # ---- candidates ----
    def movable(self, rows: Sequence[int], next_step_id: int, terms: MoveTerms) -> RunningView:
        """Return, by rank (`rows`) and slot, the blocks that each request would need on another
        rank: after the next plan, and at its longest. 0 for requests that may not move.
        """
        table, shape = self._table, (-1, self._per_rank)
        # The plan that publishes a request's KV must compute it.
        may_move = (table.state == SlotState.ACTIVE) & ~table.rests
        may_move &= ~table.is_muted & ~table.is_preempted
        may_move &= table.max_tokens - table.output_index >= terms.num_tokens_left_min
        may_move &= next_step_id - table.moved_step_id >= terms.gain_steps
        for key in (
            self.arriving
        ):  # Its earlier copy still runs, and a request may have only one copy at a time.
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
        """Return the positions to reserve at the targets of these slots' requests."""
        written: Ints = self._table.length[slots] + self._table.num_unsure[slots]
        return written + self._num_more

    # ---- steps of a move ----
    def reserve(self, moves: Sequence[Move], step_id: int) -> list[int]:
        """Reserve slots and blocks at the targets of chosen moves, and return the source slots.
        Plan `step_id` is the last to compute them.
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
            self._trips[source] = Trip(key, source, step_id, target)
            sources.append(source)
        return sources

    def depart(self, sources: Sequence[int]) -> None:
        """Mark sources as MOVING: the plan that computes them for the last time is made."""
        for source in sources:
            self._table.state[source] = SlotState.MOVING
            self._table.left_step_id[source] = self._trips[source].step_id

    def done(self, done_step_id: int) -> list[Pull]:
        """Return the copies to start, now that the last plan at the source is done."""
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
        """Handle the end of a copy: the request continues at the target, or at the source if the
        copy failed or was called off.
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
        """Call off moves of requests that have rested for STALL_STEPS_MAX steps."""
        for trip in list(self._trips.values()):
            if trip.lease is not None and next_step_id - trip.step_id - 1 >= STALL_STEPS_MAX:
                self.call_off(trip.source)

    def call_off_into(self, ranks: Sequence[int]) -> None:
        """Call off moves into ranks that are short of blocks."""
        for trip in list(self._trips.values()):
            if trip.target is not None and trip.target // self._per_rank in ranks:
                self.call_off(trip.source)

    def call_off(self, source: int) -> None:
        """Call off a move: the request continues at its source."""
        trip, table = self._trips[source], self._table
        self._let_target_go(trip)
        if trip.lease is not None:
            self._go_on(trip)
        elif table.is_in_runner[source]:  # No plan has left it out yet.
            self._go_on(trip)
            table.state[source], table.left_step_id[source] = SlotState.ACTIVE, -1

    def joined(self, slots: Sequence[int], step_id: int) -> None:
        """Note that these slots are computed from plan `step_id` on."""
        for slot in slots:
            left = int(self._table.left_step_id[slot])
            if left >= 0:
                self.stalls[step_id - left - 1] += 1
                self._table.left_step_id[slot] = -1

    # ---- ends of moves ----
    def abandon(self, source: int) -> None:
        """End the move, if any, of a request that ends or is released at its source."""
        trip = self._trips.pop(source, None)
        if trip is not None:
            self._let_target_go(trip)

    def lose_target(self, slot: int) -> None:
        """Handle the loss of the rank of a RESERVED or FILLING slot: no copy to it will end."""
        key = self._table.occupant(slot).key
        trip = self._trips.get(self._key_to_slot.get(key, -1))
        del self.arriving[key]
        self._free(slot, key)
        if trip is not None and trip.target == slot:
            trip.target = None
            if trip.lease is not None:
                self._go_on(trip)

    def roll_back(self) -> None:
        """Call off moves without a copy, as the plans in flight are void. Running copies continue."""
        for trip in list(self._trips.values()):
            if trip.lease is None:
                self._let_target_go(trip)
                self._go_on(trip)
                self._table.state[trip.source] = (
                    SlotState.ACTIVE
                )  # So that `table.roll_back` undoes the void plans for it.

    def in_flight(self) -> list[int]:
        """Return sources of moves without a copy: after a failed step their KV is unknown."""
        return [trip.source for trip in self._trips.values() if trip.lease is None]

    def is_going(self, source: int) -> bool:
        """Return whether the slot's blocks become free if its copy ends well."""
        trip = self._trips.get(source)
        return trip is not None and trip.target is not None

    def _go_on(self, trip: Trip) -> None:
        del self._trips[trip.source]
        self._table.state[trip.source] = SlotState.READY
        self.num_called_off += 1

    def _let_target_go(self, trip: Trip) -> None:
        if trip.target is not None and trip.lease is None:
            del self.arriving[trip.key]
            self._free(trip.target, trip.key)
        trip.target = None

    def _free(self, slot: int, key: Key) -> None:
        self._pools.free(slot // self._per_rank, self._table.blocks_of(slot), key)
        self._table.vacate(slot)

    def check(self) -> list[str]:
        """Return problems; empty if moves, states and keys agree, on both sides."""
        table, problems = self._table, []
        if set(table.slots_in(SlotState.MOVING).tolist()) != self._trips.keys():
            problems.append(f"slots {sorted(self._trips)} have moves, but others are MOVING")
        if set(table.slots_in(*ARRIVING).tolist()) != set(self.arriving.values()):
            problems.append(
                f"slots {sorted(self.arriving.values())} await a move, and others are RESERVED or"
                " FILLING"
            )
        awaited = {trip.target for trip in self._trips.values()}
        for slot in table.slots_in(SlotState.RESERVED).tolist():
            if slot not in awaited:
                problems.append(f"slot {slot} is reserved for no request")
        for trip in self._trips.values():
            if self._key_to_slot.get(trip.key) != trip.source:
                problems.append(f"{trip.key} moves from slot {trip.source}, which does not hold it")
            if trip.target is None:
                continue
            state = SlotState.RESERVED if trip.lease is None else SlotState.FILLING
            if self.arriving.get(trip.key) != trip.target or table.state[trip.target] != state:
                problems.append(
                    f"{trip.key} moves to slot {trip.target}, which is not {STATE_TO_NAME[state]}"
                    " for it"
                )
            if trip.target // self._per_rank == trip.source // self._per_rank:
                problems.append(f"{trip.key} moves within its rank")
        return problems


class ImbalanceLooks:
    """Plans before which the ranks' imbalance is checked: fewer while moves fail."""

    def __init__(self, moving: DecodeMoving) -> None:
        self._moving = moving
        self._next_step_id = 0
        self._num_steps = LOOK_STEPS
        self._num_seen = (0, 0)
        """Moves done and moves called off, at the last check."""

    def is_due(self, step_id: int) -> bool:
        """Return whether to check before plan `step_id`; True counts as a check."""
        if step_id < self._next_step_id:
            return False
        seen = self._moving.num_moved, self._moving.num_called_off
        if seen[0] > self._num_seen[0]:
            self._num_steps = LOOK_STEPS
        elif seen[1] > self._num_seen[1]:
            # Copies take too long for these steps, or fail: check less often.
            self._num_steps = min(2 * self._num_steps, LOOK_STEPS_MAX)
        self._num_seen = seen
        self._next_step_id = step_id + self._num_steps
        return True

"""Requests of a decode unit as arrays, one row per slot: a step needs no loop over requests.

    FREE --reserve--> PULLING --KvPulled--> READY --join--> ACTIVE --leave--> CLOSING --last plan done--> FREE
       '------------- resume ---------------^ ^--- roll_back: the plans in flight are void ---'

A request that moves to another rank has two slots for a while (roles/decode/moving):

    source   ACTIVE --depart--> MOVING --KvPulled--> FREE        (called off, or the copy failed: READY or ACTIVE)
    target   FREE --reserve--> RESERVED --last plan of the source done--> FILLING --KvPulled--> READY (else FREE)

An ACTIVE or READY slot may rest in the next plan: it is in the Runner's table and is not computed
(policy/rows).

A unit's table holds its ranks' slots one after another: slot = rank * slots per rank + the rank's
own slot. Every position is counted up to the last *emitted* plan, so the next plan can be made
while two are in flight. A plan gives one token per pass, or more if it checks drafts (speculative
decoding): sure tokens and possible further ones are counted apart. A slot stays CLOSING, with its
blocks, until the last plan that computes it is done; only then may another request write there. A
FILLING or PULLING slot stays until its copy has ended, even if its request is gone. Sends no
messages and does not use the allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Bools, Floats, Ints
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation, Key
from hadal.core.messages.units import KvLease
from hadal.core.plans import HeldKv
from hadal.core.stops import StopIds
from hadal.policy.fairness import is_batch
from hadal.policy.rows import RowsView, requeued
from hadal.roles.unit.tokens import needs_output

States = NDArray[np.int8]
_NEVER = -(1 << 40)


class SlotState:
    """States as plain numbers: numpy compares 50x slower with members of an IntEnum."""

    FREE = 0
    PULLING = 1
    READY = 2
    ACTIVE = 3
    CLOSING = 4
    MOVING = 5
    """Holds a request and its KV without computing it: a copy to another rank runs or will start.
    """
    RESERVED = 6
    """Holds blocks for a request that is MOVING; nothing is written there yet."""
    FILLING = 7
    """Receives the copy of a MOVING request's KV, even if the request no longer needs it."""


STATE_TO_NAME: dict[int, str] = {
    number: name for name, number in vars(SlotState).items() if name.isupper()
}
ARRIVING = (SlotState.RESERVED, SlotState.FILLING)
"""States of the target slot of a request that moves within the unit."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """Request in a slot: its fixed properties. Changing numbers are in the arrays."""

    generation: Generation
    lease: KvLease
    arrival: int

    @property
    def key(self) -> Key:
        return self.generation.request_id, self.generation.attempt


class DecodeTable:
    """Arrays by slot. Callers keep them consistent, which `check` verifies."""

    def __init__(self, num_slots: int, num_blocks_max: int) -> None:
        """`num_blocks_max` is the most blocks one request can hold."""
        self.num_slots = num_slots
        self.num_blocks_max = num_blocks_max
        self.state: States = np.zeros(num_slots, np.int8)
        self.is_in_runner: Bools = np.zeros(num_slots, np.bool_)
        """True if the slot is occupied in the Runner's own table after the last emitted plan."""
        self.is_muted: Bools = np.zeros(num_slots, np.bool_)
        """True if the slot's further tokens are dropped: its request ended or was returned."""
        self.is_preempted: Bools = np.zeros(num_slots, np.bool_)
        """True if the request returns to the front once its last tokens are delivered."""
        self.length: Ints = np.zeros(num_slots, np.int64)
        """KV positions certainly written once all emitted plans are done. The next plan writes at
        this position, or up to `num_unsure` further on.
        """
        self.num_unsure: Ints = np.zeros(num_slots, np.int64)
        """Drafts that the plans in flight check: possible tokens beyond one per pass."""
        self.output_index: Ints = np.zeros(num_slots, np.int64)
        """Lowest possible output index of the first token that the next plan draws."""
        self.attempt_id: Ints = np.zeros(num_slots, np.int64)
        """Attempt id by which the front identifies the slot's tokens."""
        self.max_tokens: Ints = np.zeros(num_slots, np.int64)
        self.min_tokens: Ints = np.zeros(num_slots, np.int64)
        self.stops = StopIds(num_slots)
        self.block_ids: list[list[int]] = [[] for _ in range(num_slots)]
        self.room: Ints = np.zeros(num_slots, np.int64)
        """Positions that fit into the slot's blocks."""
        self.last_step_id: Ints = np.full(num_slots, -1, np.int64)
        """Last emitted plan that computes the slot, or in which it rests."""
        self.rests: Bools = np.zeros(num_slots, np.bool_)
        """True if the slot rests in the next plan. Meaningless for slots that it could not compute."""
        self.turn: Ints = np.zeros(num_slots, np.int64)
        """Place in the queue of rows: the smallest is computed next (policy/rows). Meaningless
        before the slot is ACTIVE.
        """
        self.tenant: Ints = np.zeros(num_slots, np.int64)
        """Number of the request's tenant in this table."""
        self.weight: Floats = np.ones(num_slots)
        """Weight of the request's tenant."""
        self.is_batch: Bools = np.zeros(num_slots, np.bool_)
        self._tenant_to_number: dict[str, int] = {}
        self.moved_step_id: Ints = np.zeros(num_slots, np.int64)
        """Plan with which the request's last move began; negative: it has not moved."""
        self.left_step_id: Ints = np.full(num_slots, -1, np.int64)
        """Last plan that computed the slot, while it rests for a move; else -1."""
        self.last_token: Ints = np.zeros(num_slots, np.int64)
        """Last delivered token, with which a join begins."""
        self.tail: Ints = np.zeros((num_slots, BLOCK_TOKENS), np.int64)
        """Delivered tokens of the block being filled, by position % BLOCK_TOKENS, if `is_named`."""
        self.is_named: Bools = np.zeros(num_slots, np.bool_)
        """True if blocks that the slot fills get names."""
        self.names: list[bytes] = [b""] * num_slots
        """Names of all full blocks of the slot's text, if `is_named`."""
        self.outputs: dict[int, list[int]] = {}
        """Slot -> all delivered tokens, if a penalty or a grammar needs them."""
        self.occupants: list[Occupant | None] = [None] * num_slots

    def slots_in(self, *states: int) -> Ints:
        is_in = self.state == states[0]
        for state in states[1:]:  # np.isin takes 10x as long for two states.
            is_in |= self.state == state
        return np.flatnonzero(is_in)

    def reserve(
        self,
        generation: Generation,
        lease: KvLease,
        arrival: int,
        block_ids: Sequence[int],
        among: slice = slice(None),
    ) -> int:
        """Give a free slot of `among` to a prefilled request and return it: `generation` has the
        first token, `lease` the KV. The caller ensures that a slot is free.
        """
        slot = self._free_slot(among)
        self.state[slot] = SlotState.PULLING
        self.is_muted[slot] = self.is_preempted[slot] = self.is_named[slot] = False
        self._set_blocks(slot, block_ids)
        self.last_step_id[slot] = self.left_step_id[slot] = -1
        self.moved_step_id[slot] = _NEVER
        self.length[slot] = lease.num_tokens
        self.num_unsure[slot] = 0
        self.output_index[slot] = len(generation.output)
        self.attempt_id[slot] = generation.attempt_id
        self.max_tokens[slot] = generation.max_tokens
        self.min_tokens[slot] = generation.min_tokens
        self.stops.set(slot, generation.stop_ids)
        self.last_token[slot] = generation.output[-1]
        if needs_output(generation.sampling):
            self.outputs[slot] = list(generation.output)
        tenants, name = self._tenant_to_number, generation.tenant
        self.tenant[slot] = tenants.setdefault(name, len(tenants))
        self.weight[slot], self.is_batch[slot] = generation.weight, is_batch(name)
        self.occupants[slot] = Occupant(generation, lease, arrival)
        return slot

    def set_lease(self, slot: int, lease: KvLease) -> None:
        """Note which part of a request's KV came from another unit."""
        occupant = self.occupant(slot)
        self.occupants[slot] = Occupant(occupant.generation, lease, occupant.arrival)

    def resume(self, generation: Generation, kv: HeldKv, arrival: int, among: slice) -> int:
        """Give a free slot of `among` to a request and return it. Its KV, for all but the last
        output token, is in `kv`'s blocks. The caller ensures that a slot is free.
        """
        lease = KvLease("", (), (), len(generation.prompt) + len(generation.output) - 1)
        slot = self.reserve(generation, lease, arrival, kv.block_ids, among)
        self.state[slot] = SlotState.READY
        return slot

    def _set_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        self.block_ids[slot] = list(block_ids)
        self.room[slot] = len(block_ids) * BLOCK_TOKENS

    def _free_slot(self, among: slice) -> int:
        first_free = int((self.state[among] == SlotState.FREE).argmax())
        return (among.start or 0) + first_free

    def reserve_for(self, source: int, block_ids: Sequence[int], among: slice) -> int:
        """Reserve a slot of `among` for the request at `source`, which continues there for now."""
        slot = self._free_slot(among)
        self.state[slot] = SlotState.RESERVED
        self.is_muted[slot] = self.is_preempted[slot] = False
        self._set_blocks(slot, block_ids)
        self.last_step_id[slot] = -1
        self._copy_row(source, slot)
        self.occupants[slot] = self.occupant(source)
        return slot

    def go_on_at(self, source: int, target: int, lease: KvLease) -> None:
        """Continue a request at `target`, where its KV is now: it joins there with the next plan.
        `lease`: lease of the copy. The caller frees `source`.
        """
        self._copy_row(source, target)
        self.names[target] = self.names[source]
        if source in self.outputs:
            self.outputs[target] = self.outputs.pop(source)
        occupant = self.occupant(source)
        self.occupants[target] = Occupant(occupant.generation, lease, occupant.arrival)
        self.state[target] = SlotState.READY

    def _copy_row(self, source: int, target: int) -> None:
        for array in (
            self.length,
            self.num_unsure,
            self.output_index,
            self.attempt_id,
            self.max_tokens,
            self.min_tokens,
            self.last_token,
            self.turn,
            self.tenant,
            self.weight,
            self.is_batch,
            self.moved_step_id,
            self.left_step_id,
            self.tail,
            self.is_named,
        ):
            array[target] = array[source]
        self.stops.copy(source, target)

    def vacate(self, slot: int) -> None:
        """Free a slot. If it is in the Runner's table, the next plan removes it from there."""
        self.state[slot] = SlotState.FREE
        self._set_blocks(slot, ())
        self.outputs.pop(slot, None)
        self.occupants[slot] = None

    def occupant(self, slot: int) -> Occupant:
        occupant = self.occupants[slot]
        assert occupant is not None, f"slot {slot} is empty"
        return occupant

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        return tuple(self.block_ids[slot])

    def is_as_pulled(self, slot: int) -> bool:
        """Return whether no token was delivered since the KV was pulled. True even after a join
        with void plans: the Runner may have written positions behind the pulled ones, which are
        then written again.
        """
        return int(self.length[slot]) == self.occupant(slot).lease.num_tokens

    def grow(self, slot: int, block_id: int) -> int:
        """Append a block and return its position in the slot's list."""
        self.block_ids[slot].append(block_id)
        self.room[slot] += BLOCK_TOKENS
        return len(self.block_ids[slot]) - 1

    def in_next(self) -> Bools:
        """Return the slots that the next plan computes or in which they rest."""
        is_in: Bools = (self.state == SlotState.ACTIVE) | (self.state == SlotState.READY)
        return is_in

    def computed_next(self) -> Bools:
        """Return the slots that the next plan computes."""
        return self.in_next() & ~self.rests

    def rows(self, per_rank: int) -> tuple[Ints, RowsView]:
        """Return the slots that the next plan may compute, and their view for policy/rows."""
        slots = np.flatnonzero(self.in_next())
        # A joining request is placed behind all rows of its tenant.
        is_ready = self.state[slots] == SlotState.READY
        turns = np.where(is_ready, self.turn.max() + 1 + slots, self.turn[slots])
        return slots, RowsView(
            slots // per_rank, self.tenant[slots], self.weight[slots], self.is_batch[slots], turns
        )

    def needing_block(self, num_more: int = 0) -> Ints:
        """Return slots of the next plan that would write beyond their blocks if all unsure tokens
        came. The plan may write `num_more` further positions, for passes and drafts, but none
        behind a request's last token.
        """
        computed = self.computed_next()
        num_written = self.length + self.num_unsure + num_more + 1
        num_wanted = self.length - self.output_index + self.max_tokens
        return np.flatnonzero(computed & (np.minimum(num_written, num_wanted) > self.room))

    def at_max_tokens(self) -> Ints:
        """Return active slots that certainly draw their last token in an emitted plan; they leave
        before its result arrives.
        """
        return np.flatnonzero(
            (self.state == SlotState.ACTIVE) & (self.output_index >= self.max_tokens)
        )

    def most_passes(self, num_drafts: int) -> int:
        """Return the most passes of the next plan, 1 or more: its slots must have blocks and
        remaining tokens even if all `num_drafts` drafts are right in each pass.
        """
        left = np.minimum(self.max_tokens - self.output_index, self.room - self.length)
        fewest = int((left - self.num_unsure)[self.computed_next()].min(initial=1 << 30))
        return max(1, fewest // (1 + num_drafts))

    def advance(self, step_id: int, num_checked: Ints | int = 0, num_passes: int = 1) -> Bools:
        """Count `num_passes` more tokens for every active slot that does not rest, and up to
        `num_checked` unsure ones. Return these slots.
        """
        active: Bools = self.state == SlotState.ACTIVE
        computed = active & ~self.rests
        self.length += num_passes * computed
        self.output_index += num_passes * computed
        self.num_unsure += num_checked * computed
        # A resting slot keeps its blocks just as long: its rank has it in the table.
        self.last_step_id[active] = step_id
        if (active & self.rests).any():  # Otherwise the order does not change.
            self.turn = requeued(self.turn, computed)
        return computed

    def settle(self, num_checked: Ints, slots: Ints, num_more: Ints) -> None:
        """Correct the counts after a plan that checked `num_checked` drafts per slot. `slots`
        drew `num_more` tokens more than `advance` counted; negative if a stop id ended them early.
        """
        self.num_unsure -= num_checked
        self.length[slots] += num_more
        self.output_index[slots] += num_more

    def deliver(self, slots: Ints, values: Ints) -> None:
        """Note tokens delivered for these slots; tokens of one slot are in order."""
        self.last_token[slots] = values  # For repeated slots, numpy keeps the last value.
        if self.outputs:
            for slot, value in zip(slots.tolist(), values.tolist(), strict=True):
                if slot in self.outputs:
                    self.outputs[slot].append(value)

    def roll_back(self, num_void: Ints) -> None:
        """Undo the plans in flight, which counted `num_void` tokens per slot.

        Slots return to the last delivered token. The Runner's table is empty then. Computed slots
        join again, and so do slots that closed only because a void plan would have drawn their last
        token. Closing slots of ended requests stay closing.
        """
        self.length -= num_void
        self.output_index -= num_void
        self.num_unsure[:] = 0
        self.last_step_id[:] = -1
        self.left_step_id[self.state != SlotState.MOVING] = -1
        self.is_in_runner[:] = False
        wanted = ~self.is_muted & ~self.is_preempted
        self.state[
            ((self.state == SlotState.ACTIVE) | (self.state == SlotState.CLOSING)) & wanted
        ] = SlotState.READY

    def releasable(self, done_step_id: int) -> Ints:
        """Return closing slots that no plan after `done_step_id` computes."""
        closing = np.flatnonzero(self.state == SlotState.CLOSING)
        return closing[self.last_step_id[closing] <= done_step_id]

    def check(self) -> list[str]:
        """Return problems of the table itself; empty if rows and occupants agree."""
        problems = []
        columns = (
            self.state,
            self.length,
            self.room,
            self.output_index,
            self.is_muted,
            self.is_in_runner,
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for slot, (occupant, block_ids, row) in enumerate(
            zip(self.occupants, self.block_ids, rows, strict=True)
        ):
            state, length, room, output_index, is_muted, is_in_runner = row
            blocks, name = len(block_ids), STATE_TO_NAME[state]
            if (state == SlotState.FREE) != (occupant is None) or (state == SlotState.FREE) != (
                blocks == 0
            ):
                problems.append(
                    f"slot {slot} is {name} with {blocks} blocks and occupant {occupant and occupant.key}"
                )
            if room != blocks * BLOCK_TOKENS:
                problems.append(f"slot {slot} has room for {room} positions in {blocks} blocks")
            # Drafts may have ended a request while a later plan that computes it was emitted
            # already: its rank writes positions beyond the blocks into the scratch block.
            may_be_beyond = state == SlotState.CLOSING and is_muted
            if state != SlotState.FREE and not may_be_beyond and length > blocks * BLOCK_TOKENS:
                problems.append(f"slot {slot} has {length} positions in {blocks} blocks")
            if state in (SlotState.ACTIVE, SlotState.MOVING) and is_muted:
                problems.append(f"slot {slot} is {name} for no request")
            if state == SlotState.ACTIVE and not is_in_runner:
                problems.append(f"slot {slot} is active and not in the Runner")
            if occupant is None:
                continue
            if length - output_index != len(occupant.generation.prompt) - 1:
                problems.append(
                    f"slot {slot}: position {length} and output index {output_index} disagree"
                )
        return problems

"""The decode unit's requests as arrays, one row per slot: what a step reads and writes without a
loop over requests.

    FREE --reserve--> PULLING --KvPulled--> READY --join--> ACTIVE --leave--> CLOSING --last plan done--> FREE
       '------------- resume ---------------^ ^--- roll_back: the plans in flight are void ---'

A request that changes its rank has two slots for a while (roles/decode/slots):

    source   ACTIVE --depart--> MOVING --KvPulled--> FREE        (called off, or the copy failed: READY or ACTIVE)
    target   FREE --reserve--> RESERVED --last plan of the source done--> FILLING --KvPulled--> READY (else FREE)

An ACTIVE or READY slot may rest in the next plan: it is in the Runner's table and is not computed
(policy/rows).

A unit's table holds its ranks' slots one after another: slot = rank * slots of a rank + the rank's
own slot. Every position is counted up to the last *emitted* plan, so the next plan can be made
while two are in flight. A plan gives one token a pass, or more where it checks drafts: counted are
those that are sure, and beside them what may come more. A slot stays CLOSING, with its blocks,
until the last plan that computes it is done: only then may somebody else write there. So does one
that is FILLING or PULLING, until its copy has ended, whatever became of its request. Knows neither
messages nor the allocator.
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
    """Numbers as they are: numpy takes fifty times as long to compare with a member of an
    IntEnum.
    """

    FREE = 0
    PULLING = 1
    READY = 2
    ACTIVE = 3
    CLOSING = 4
    MOVING = 5
    """Holds the request and its KV, and is not computed any more: a copy is going to another rank,
    or will.
    """
    RESERVED = 6
    """Holds room for a request that is MOVING; nothing is written there yet."""
    FILLING = 7
    """A copy of a MOVING request's KV is written there, or of one that needs it no more."""


STATE_TO_NAME: dict[int, str] = {
    number: name for name, number in vars(SlotState).items() if name.isupper()
}
ARRIVING = (SlotState.RESERVED, SlotState.FILLING)
"""States of a request that comes from another rank of the unit."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """What a slot's request is called and asked for; the numbers that change are in the arrays."""

    generation: Generation
    lease: KvLease
    arrival: int

    @property
    def key(self) -> Key:
        return self.generation.request_id, self.generation.attempt


class DecodeTable:
    """Arrays by slot. Writers keep them true; `check` says whether they did."""

    def __init__(self, num_slots: int, num_blocks_max: int) -> None:
        """`num_blocks_max` is the most blocks one request can hold."""
        self.num_slots = num_slots
        self.num_blocks_max = num_blocks_max
        self.state: States = np.zeros(num_slots, np.int8)
        self.is_in_runner: Bools = np.zeros(num_slots, np.bool_)
        """The Runner's own table has the slot occupied, after the last emitted plan."""
        self.is_muted: Bools = np.zeros(num_slots, np.bool_)
        """Whatever the Runner draws for it is dropped: it finished, or nobody wants it."""
        self.is_preempted: Bools = np.zeros(num_slots, np.bool_)
        """The request goes back to the front once its last tokens were delivered."""
        self.length: Ints = np.zeros(num_slots, np.int64)
        """KV positions written after the last emitted plan, at least; the next one writes this
        position, or one up to `num_unsure` further on.
        """
        self.num_unsure: Ints = np.zeros(num_slots, np.int64)
        """Drafts that the plans in flight check: tokens that may come beside one a pass."""
        self.output_index: Ints = np.zeros(num_slots, np.int64)
        """Index in the output of the first token that the next plan draws, at least."""
        self.attempt_id: Ints = np.zeros(num_slots, np.int64)
        """The attempt id by which the front knows its tokens."""
        self.max_tokens: Ints = np.zeros(num_slots, np.int64)
        self.min_tokens: Ints = np.zeros(num_slots, np.int64)
        self.stops = StopIds(num_slots)
        self.block_ids: list[list[int]] = [[] for _ in range(num_slots)]
        self.room: Ints = np.zeros(num_slots, np.int64)
        """Positions that fit into those blocks."""
        self.last_step_id: Ints = np.full(num_slots, -1, np.int64)
        """The last emitted plan that computes the slot, or in which it rests."""
        self.rests: Bools = np.zeros(num_slots, np.bool_)
        """Whether the slot rests in the next plan. Means nothing where none would compute it."""
        self.turn: Ints = np.zeros(num_slots, np.int64)
        """Its place in the queue of rows: the smallest is computed next (policy/rows). It means nothing
        before the slot is ACTIVE.
        """
        self.tenant: Ints = np.zeros(num_slots, np.int64)
        """Number of its tenant."""
        self.weight: Floats = np.ones(num_slots)
        """Weight of its tenant."""
        self.is_batch: Bools = np.zeros(num_slots, np.bool_)
        self._tenant_to_number: dict[str, int] = {}
        self.moved_step_id: Ints = np.zeros(num_slots, np.int64)
        """The plan with which it last began to move; negative: never."""
        self.left_step_id: Ints = np.full(num_slots, -1, np.int64)
        """While it stands still for a move: the last plan that computed it. Else -1."""
        self.last_token: Ints = np.zeros(num_slots, np.int64)
        """The last token delivered, with which a join begins."""
        self.tail: Ints = np.zeros((num_slots, BLOCK_TOKENS), np.int64)
        """The token at every position of the block being filled, by position % BLOCK_TOKENS, as far
        as delivered, where it `is_named`.
        """
        self.is_named: Bools = np.zeros(num_slots, np.bool_)
        """Blocks that it fills get names."""
        self.names: list[bytes] = [b""] * num_slots
        """Names of all full blocks of its text, where it `is_named`."""
        self.outputs: dict[int, list[int]] = {}
        """slot -> all delivered tokens, where a penalty or a grammar asks for them."""
        self.occupants: list[Occupant | None] = [None] * num_slots

    def slots_in(self, *states: int) -> Ints:
        is_in = self.state == states[0]
        for state in states[1:]:  # np.isin takes ten times as long for two states.
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
        """Give a slot to a request whose prompt is prefilled: `generation` has the first token, `lease` the
        KV. The caller made sure that a slot is free `among` these.
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
        """Note which of a request's KV came from another unit."""
        occupant = self.occupant(slot)
        self.occupants[slot] = Occupant(occupant.generation, lease, occupant.arrival)

    def resume(self, generation: Generation, kv: HeldKv, arrival: int, among: slice) -> int:
        """Give a slot to a request whose KV is in these blocks already, up to the last token of its output.
        The caller made sure that a slot is free `among` these.
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
        """Take a slot `among` these for the request at `source`, which goes on there for now."""
        slot = self._free_slot(among)
        self.state[slot] = SlotState.RESERVED
        self.is_muted[slot] = self.is_preempted[slot] = False
        self._set_blocks(slot, block_ids)
        self.last_step_id[slot] = -1
        self._copy_row(source, slot)
        self.occupants[slot] = self.occupant(source)
        return slot

    def go_on_at(self, source: int, target: int, lease: KvLease) -> None:
        """The request's KV is at `target`, as `lease` had it: it joins there next. `source` still
        has to be freed.
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
        """Free a slot. The Runner may still list it: the next plan says that it leaves."""
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
        """No token was delivered since the KV was pulled. Still so after a join whose plans were
        void: then it is not known whether the Runner saw it, and what it wrote lies behind what was
        pulled and is written again.
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
        """Return the slots that the next plan may compute, and how policy/rows sees them."""
        slots = np.flatnonzero(self.in_next())
        # One that comes passes no row of its tenant.
        is_ready = self.state[slots] == SlotState.READY
        turns = np.where(is_ready, self.turn.max() + 1 + slots, self.turn[slots])
        return slots, RowsView(
            slots // per_rank, self.tenant[slots], self.weight[slots], self.is_batch[slots], turns
        )

    def needing_block(self, num_more: int = 0) -> Ints:
        """Slots of the next plan that would write beyond their blocks, were all unsure tokens to
        come; and where it may write so many `num_more` positions for further passes and drafts,
        though none that the request's last token is behind.
        """
        computed = self.computed_next()
        num_written = self.length + self.num_unsure + num_more + 1
        num_wanted = self.length - self.output_index + self.max_tokens
        return np.flatnonzero(computed & (np.minimum(num_written, num_wanted) > self.room))

    def at_max_tokens(self) -> Ints:
        """Active slots whose last token is sure to be drawn by a plan already emitted: they leave
        without waiting for it.
        """
        return np.flatnonzero(
            (self.state == SlotState.ACTIVE) & (self.output_index >= self.max_tokens)
        )

    def most_passes(self, num_drafts: int) -> int:
        """Return how many passes the next plan may have, 1 or more: its slots have blocks for them, and
        tokens left, if all of so many drafts are right in each.
        """
        left = np.minimum(self.max_tokens - self.output_index, self.room - self.length)
        fewest = int((left - self.num_unsure)[self.computed_next()].min(initial=1 << 30))
        return max(1, fewest // (1 + num_drafts))

    def advance(self, step_id: int, num_checked: Ints | int = 0, num_passes: int = 1) -> Bools:
        """Count so many more tokens for every active slot that does not rest, which `num_checked` of its
        drafts may follow. Return which slots those are.
        """
        active: Bools = self.state == SlotState.ACTIVE
        computed = active & ~self.rests
        self.length += num_passes * computed
        self.output_index += num_passes * computed
        self.num_unsure += num_checked * computed
        # A slot that rests keeps its blocks just as long: its rank has it in the table.
        self.last_step_id[active] = step_id
        if (active & self.rests).any():  # Else all keep their order.
            self.turn = requeued(self.turn, computed)
        return computed

    def settle(self, num_checked: Ints, slots: Ints, num_more: Ints) -> None:
        """A plan is done that checked so many drafts of every slot: of these slots, `num_more` tokens
        came beside those that were counted. It is negative where a stop id came before them.
        """
        self.num_unsure -= num_checked
        self.length[slots] += num_more
        self.output_index[slots] += num_more

    def deliver(self, slots: Ints, values: Ints) -> None:
        """Note the tokens that these slots' requests got, those of one slot in their order."""
        self.last_token[slots] = values  # Of several of a slot, numpy keeps the last.
        if self.outputs:
            for slot, value in zip(slots.tolist(), values.tolist(), strict=True):
                if slot in self.outputs:
                    self.outputs[slot].append(value)

    def roll_back(self, num_void: Ints) -> None:
        """Undo the last plans, which counted `num_void` tokens of each slot: back to the last token
        delivered.

        The Runner's table is empty. What was being computed, or closed only because a void plan
        would have drawn its last token, has to join again; closing slots that nobody wants stay as
        they are.
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
        """Closing slots that no plan after `done_step_id` computes."""
        closing = np.flatnonzero(self.state == SlotState.CLOSING)
        return closing[self.last_step_id[closing] <= done_step_id]

    def check(self) -> list[str]:
        """Problems of the table by itself; empty when rows and occupants agree."""
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
            # Drafts may have brought a request to its end, and a plan was out that computes it
            # behind that: its rank writes what lies beyond the blocks into the scratch block.
            may_be_beyond = state == SlotState.CLOSING and is_muted
            if state != SlotState.FREE and not may_be_beyond and length > blocks * BLOCK_TOKENS:
                problems.append(f"slot {slot} has {length} positions in {blocks} blocks")
            if state in (SlotState.ACTIVE, SlotState.MOVING) and is_muted:
                problems.append(f"slot {slot} is {name} for nobody")
            if state == SlotState.ACTIVE and not is_in_runner:
                problems.append(f"slot {slot} is active and not in the Runner")
            if occupant is None:
                continue
            if length - output_index != len(occupant.generation.prompt) - 1:
                problems.append(
                    f"slot {slot}: position {length} and output index {output_index} disagree"
                )
        return problems

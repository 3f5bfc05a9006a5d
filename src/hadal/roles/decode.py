"""The decode unit's leader: pulls prefilled KV in, and makes one token a step for every request it holds.

Two plans are in flight, so the Runner never waits for one. The price: a stop id is noticed one plan late.

    plan k     | A B C |                     result k: B drew its stop id
    plan k+1   | A B C |  was emitted already; B's token of it is dropped
    plan k+2   | A C D |  B leaves; its blocks were free when k+1 was done

A request that ends by count is left out in time, as that is known beforehand. Its state is a table of arrays
(`decode_table`), a plan is a difference. Knows nothing of other units; blocks, slots and ends are decided here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hadal.core.errors import InvariantError
from hadal.core.messages import (
    BLOCK_TOKENS,
    Audit,
    AuditRequest,
    Cancel,
    Decode,
    FrontUp,
    Pulled,
    Returned,
    Token,
    Tokens,
)
from hadal.core.plans import DecodePlan, Join, KvPulled, StepDone
from hadal.core.seams import MAX_STEPS_IN_FLIGHT, Effect, Event, Execute, Freed, Pull, Send, Tick
from hadal.kv.blocks import BlockAllocator, blocks_for
from hadal.policy.admission import fits_decode
from hadal.policy.preemption import choose_victims
from hadal.policy.views import HolderView
from hadal.roles.decode_table import Bools, DecodeTable, SlotState
from hadal.roles.ending import LENGTH, STOP, history_of
from hadal.roles.reasons import PREEMPTED, PULL_FAILED, QUEUE_FULL, STEP_FAILED, TOO_LONG
from hadal.roles.unit import UnitReporter

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _InFlight:
    step_id: int
    computed: Bools
    """By slot: whether the plan computes it."""
    num_computed: int


class DecodeLeader:
    """`max_context` is the longest prompt and output together; it bounds a request's list of blocks."""

    def __init__(
        self, unit: str, epoch: str, num_blocks: int, *, num_slots: int, num_waiting_max: int, max_context: int,
        heartbeat_s: float,
    ) -> None:  # fmt: skip
        self.blocks = BlockAllocator(num_blocks)
        self.table = DecodeTable(num_slots, min(self.blocks.num_usable, blocks_for(max_context)))
        self._unit = unit
        self._num_waiting_max = num_waiting_max
        self._waiting: dict[Key, Decode] = {}
        self._key_to_slot: dict[Key, int] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._num_plans = 0
        self._num_arrivals = 0
        self._is_starved = False
        """The next plan waits for blocks: nobody is seated before it has them."""
        self._reporter = UnitReporter(unit, "decode", epoch, self.blocks, num_slots, heartbeat_s)
        self._out: list[Effect] = []
        self._freed: list[int] = []

    def start(self, now_s: float) -> list[Effect]:
        """The first effects of the process: say that the unit is up."""
        return [self._reporter.up(), *self._reporter.beat(now_s, self.num_requests, 0, None)]

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        """Take in one event and return what to do, in order."""
        self._out, self._freed = [], []
        match event:
            case StepDone():
                self._step_done(event)
            case Decode():
                self._accept(event)
            case KvPulled():
                self._pulled(event)
            case Cancel(request_id, attempt):
                self._cancel((request_id, attempt))
            case FrontUp():
                if self._reporter.is_new_front(event):
                    self._waiting.clear()
                    for slot in self._key_to_slot.copy().values():
                        self._close(slot)
                self._out.append(self._reporter.up())
            case AuditRequest(reply_id):
                problems = tuple(self.audit())
                answer = Audit(self._unit, reply_id, self.blocks.num_used, self.num_requests, problems)
                self._out.append(Send("front", answer))
            case Tick():
                pass  # What is due by now is seen to below, as after any event.
            case _:
                raise InvariantError(f"{self._unit}: a decode leader cannot take {type(event).__name__}")
        self._plan()
        if self._waiting and not self._is_starved:
            self._seat_waiting()
        if self._freed:
            # Before the plans and pulls of this event, which may write these blocks.
            self._out.insert(0, Freed(tuple(self._freed)))
        self._out += self._reporter.beat(now_s, self.num_requests, 0, None)
        return self._out

    # ---- what comes in ----
    def _accept(self, decode: Decode) -> None:
        generation, lease = decode.generation, decode.lease
        key = (generation.request_id, generation.attempt)
        if key in self._waiting or key in self._key_to_slot:
            return  # The same message twice.
        num_known = len(generation.prompt) + len(generation.output)
        fits = lease.num_tokens == num_known - 1 and len(lease.block_ids) == blocks_for(lease.num_tokens)
        if not fits or not generation.output:
            reason = f"{PULL_FAILED}: a lease on {lease.num_tokens} tokens does not fit {num_known} known tokens"
            self._give_back(key, reason)
        elif blocks_for(len(generation.prompt) + generation.max_tokens - 1) > self.table.block_ids.shape[1]:
            self._give_back(key, f"{TOO_LONG}: {len(generation.prompt)} + {generation.max_tokens} tokens")
        elif len(self._waiting) >= self._num_waiting_max:
            self._give_back(key, QUEUE_FULL)
        else:
            self._waiting[key] = decode

    def _seat_waiting(self) -> None:
        """Give slots and blocks to those who wait, in the order they came, and start to pull their KV."""
        num_free_slots = int(np.count_nonzero(self.table.state == SlotState.FREE))
        for key, decode in list(self._waiting.items()):
            # One block more than the KV if it ends with a full one: the first step writes the next position.
            num_blocks = decode.lease.num_tokens // BLOCK_TOKENS + 1
            num_running = self.table.num_slots - num_free_slots
            if num_free_slots == 0 or not fits_decode(self.blocks.num_free, num_blocks, num_running):
                return
            block_ids = self.blocks.allocate(num_blocks, key)
            assert block_ids is not None
            del self._waiting[key]
            self._key_to_slot[key] = self.table.reserve(decode, self._num_arrivals, block_ids)
            self._num_arrivals += 1
            num_free_slots -= 1
            into = block_ids[: len(decode.lease.block_ids)]
            self._out.append(Pull(*key, decode.lease, into))

    def _pulled(self, pulled: KvPulled) -> None:
        key = (pulled.request_id, pulled.attempt)
        slot = self._key_to_slot.get(key)
        if slot is None or self.table.state[slot] != SlotState.PULLING:
            raise InvariantError(f"{self._unit}: KV of {key} was pulled, but nobody asked for it.")
        if pulled.error is None and not self.table.is_muted[slot] and not self.table.is_preempted[slot]:
            self.table.state[slot] = SlotState.READY
            self._out.append(Send("front", Pulled(self._unit, *key)))
            return
        if pulled.error is not None and not self.table.is_muted[slot]:
            self._give_back(key, f"{PULL_FAILED}: {pulled.error}")
            self.table.is_muted[slot] = True
        self._vacate(slot)

    def _cancel(self, key: Key) -> None:
        self._waiting.pop(key, None)
        slot = self._key_to_slot.get(key)
        if slot is not None:
            self._close(slot)

    def _close(self, slot: int) -> None:
        """Nobody wants this slot's tokens any more; free it as soon as nothing writes its blocks."""
        self.table.is_muted[slot] = True
        if self.table.state[slot] == SlotState.PULLING:
            return  # The copy still writes them; KvPulled will find the slot muted.
        self.table.state[slot] = SlotState.CLOSING
        if self.table.last_step_id[slot] <= self._done_step_id:
            self._vacate(slot)

    @property
    def _done_step_id(self) -> int:
        return self._in_flight[0].step_id - 1 if self._in_flight else self._num_plans - 1

    def _vacate(self, slot: int) -> None:
        """Free a slot and its blocks; a preempted request goes back to the front, every token of it delivered."""
        key = self.table.seat(slot).key
        if self.table.is_preempted[slot] and not self.table.is_muted[slot]:
            self._give_back(key, PREEMPTED)
        block_ids = self.table.blocks_of(slot)
        self.blocks.free(block_ids, key)
        self._freed += block_ids
        self.table.vacate(slot)
        del self._key_to_slot[key]

    # ---- what comes back from the Runner ----
    def _step_done(self, done: StepDone) -> None:
        if not self._in_flight or self._in_flight[0].step_id != done.step_id:
            raise InvariantError(f"{self._unit}: step {done.step_id} is done, but it is not the one that runs.")
        step = self._in_flight.popleft()
        self._reporter.meter.done(done.elapsed_s)
        if done.error is None:
            self._take_tokens(step, done)
        else:
            self._fail(done.error)
        for slot in self.table.releasable(done.step_id).tolist():
            self._vacate(slot)

    def _take_tokens(self, step: _InFlight, done: StepDone) -> None:
        """Send the tokens of a step, and close the slots that drew their last one."""
        table = self.table
        slots, values = np.array(done.keys, np.int64), np.array(done.tokens, np.int64)
        if len(slots) != step.num_computed or len(values) != len(slots) or not step.computed[slots].all():
            raise InvariantError(f"{self._unit}: step {step.step_id} drew for {done.keys}, not its plan's slots.")
        for slot, reason in done.failed.items():
            self._give_up(slot, reason)
        wanted = ~table.is_muted[slots]
        slots, values = slots[wanted], values[wanted]
        # The arrays count up to the last emitted plan; the plans since this one have moved them on.
        index = table.output_index[slots] - 1
        for later in self._in_flight:
            index -= later.computed[slots]
        is_stop = (table.stop_ids[slots] == values[:, None]).any(axis=1) & (index + 1 > table.min_tokens[slots])
        is_last = index + 1 >= table.max_tokens[slots]
        tokens = []
        rows = zip(slots.tolist(), values.tolist(), index.tolist(), is_stop.tolist(), is_last.tolist(), strict=True)
        for slot, value, at, stops, ends in rows:
            finish = STOP if stops else LENGTH if ends else None
            request_id, attempt = table.seat(slot).key
            draw = done.draws.get(slot)
            if draw is None:
                tokens.append(Token(request_id, attempt, at, value, finish))
            else:
                tokens.append(Token(request_id, attempt, at, value, finish, draw.logprob, draw.top))
        if tokens:
            self._out.append(Send("front", Tokens(self._unit, tuple(tokens))))
        ended = slots[is_stop | is_last]
        table.is_muted[ended] = True
        table.state[ended] = SlotState.CLOSING

    def _fail(self, error: str) -> None:
        """A step failed: unknown are what its requests' KV holds and what became of its joins and leaves."""
        for slot in self.table.slots_in(SlotState.ACTIVE, SlotState.CLOSING).tolist():
            self._give_up(slot, error)
        # Let the next plan empty every slot, wherever the Runner stopped. Leaving an empty slot does nothing.
        self.table.is_in_runner[:] = True

    def _give_up(self, slot: int, error: str) -> None:
        """A computed slot's token is void: give its request back, and close it."""
        if not self.table.is_muted[slot]:
            self._give_back(self.table.seat(slot).key, f"{STEP_FAILED}: {error}")
            self.table.is_muted[slot] = True
        self.table.state[slot] = SlotState.CLOSING

    # ---- what goes to the Runner ----
    def _plan(self) -> None:
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            table = self.table
            table.state[table.at_max_tokens()] = SlotState.CLOSING
            if not (table.state == SlotState.ACTIVE).any() and not (table.state == SlotState.READY).any():
                self._is_starved = False
                return
            grown = self._grow()
            if grown is None:
                return
            leaves = np.flatnonzero(table.is_in_runner & (table.state != SlotState.ACTIVE))
            table.is_in_runner[leaves] = False
            joins = tuple(self._join(slot) for slot in table.slots_in(SlotState.READY).tolist())
            plan = DecodePlan(self._num_plans, tuple(leaves.tolist()), joins, grown)
            computed = table.advance(plan.step_id)
            self._in_flight.append(_InFlight(plan.step_id, computed, int(np.count_nonzero(computed))))
            self._num_plans += 1
            self._out.append(Execute((plan,)))

    def _join(self, slot: int) -> Join:
        table, seat = self.table, self.table.seat(slot)
        table.state[slot] = SlotState.ACTIVE
        table.is_in_runner[slot] = True
        generation = seat.generation
        return Join(
            slot, table.blocks_of(slot), int(table.length[slot]), generation.output[-1],
            int(table.output_index[slot]), generation.sampling, *history_of(generation),
            stop_ids=generation.stop_ids, min_tokens=generation.min_tokens,
        )  # fmt: skip

    def _grow(self) -> tuple[tuple[int, int, int], ...] | None:
        """Give a block to every slot that needs one for the next plan; None if it has to wait for blocks."""
        needing = self.table.needing_block()
        if needing.size > self.blocks.num_free:
            self._preempt(set(needing.tolist()))
            needing = self.table.needing_block()
        self._is_starved = needing.size > self.blocks.num_free
        if self._is_starved:
            return None
        grown = []
        for slot in needing.tolist():
            block_ids = self.blocks.allocate(1, self.table.seat(slot).key)
            assert block_ids is not None
            grown.append((slot, self.table.grow(slot, block_ids[0]), block_ids[0]))
        return tuple(grown)

    def _preempt(self, needing: set[int]) -> None:
        """Let the latest arrived go until enough blocks are free or will be, when what is in flight is done."""
        table = self.table
        holders, num_blocks_coming = [], 0
        for slot in np.flatnonzero(table.state).tolist():
            # One that goes asks for no block any more.
            num_blocks = int(table.num_blocks[slot]) + int(slot in needing)
            if table.state[slot] == SlotState.CLOSING or table.is_muted[slot] or table.is_preempted[slot]:
                num_blocks_coming += int(table.num_blocks[slot])
            else:
                holders.append(HolderView(slot, table.seat(slot).arrival, num_blocks))
        for slot in choose_victims(holders, len(needing) - self.blocks.num_free - num_blocks_coming):
            table.is_preempted[slot] = True
            if table.state[slot] == SlotState.PULLING:
                continue  # KvPulled will find it preempted.
            table.state[slot] = SlotState.CLOSING
            if table.last_step_id[slot] <= self._done_step_id:
                self._vacate(slot)

    # ---- what the front hears ----
    def _give_back(self, key: Key, reason: str) -> None:
        self._out.append(Send("front", Returned(self._unit, *key, reason)))

    @property
    def num_requests(self) -> int:
        """Attempts of which something is held here."""
        return len(self._waiting) + len(self._key_to_slot)

    def audit(self) -> list[str]:
        """Problems of all ledgers; empty when table, allocator and plans in flight agree."""
        table = self.table
        problems = self.blocks.check() + table.check()
        held = {block: key for key, slot in self._key_to_slot.items() for block in table.blocks_of(slot)}
        if held != self.blocks.owners():
            problems.append(f"blocks {sorted(held.keys() ^ self.blocks.owners().keys())} are owned but not held")
        seated = {seat.key: slot for slot, seat in enumerate(table.seats) if seat is not None}
        if seated != self._key_to_slot:
            problems.append("names and slots disagree")
        if len(self._in_flight) > MAX_STEPS_IN_FLIGHT:
            problems.append(f"{len(self._in_flight)} plans are in flight")
        for step in self._in_flight:
            if (table.state[step.computed] == SlotState.FREE).any():
                problems.append(f"step {step.step_id} computes a free slot")
        if table.releasable(self._done_step_id).size:
            problems.append("a closed slot was not freed")
        return problems

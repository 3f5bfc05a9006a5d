"""The decode unit's leader: pulls prefilled KV in, and makes one token a step for every request it
holds.

Two plans are in flight, so the Runner never waits for one. The price: a stop id is noticed one plan
late.

    plan k     | A B C |                     result k: B drew its stop id
    plan k+1   | A B C |  was emitted already; B's token of it is dropped
    plan k+2   | A C D |  B leaves; its blocks were free when k+1 was done

A request that ends by count is left out in time, as that is known beforehand. Requests belong to a
rank; what they hold there is in `decode_slots`, how they come is in `decode_arrivals`, what becomes
of the blocks that they fill in `decode_cache`. A plan is a difference, one for each rank, and all
ranks step together. When the unit forms anew, the plans in flight are void: survivors go back to
their last delivered token and join again. A leader that took its ranks over does the same with what
the front wants to go on (`decode_held`). Knows nothing of other units.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hadal.core.balance import AUTO
from hadal.core.config import DECODE
from hadal.core.errors import InvariantError
from hadal.core.messages import (
    Ahead,
    Audit,
    AuditRequest,
    Cancel,
    Decode,
    FrontUp,
    Key,
    Resume,
    Returned,
    Stop,
    Tokens,
    TraceRequest,
)
from hadal.core.plans import BlocksStored, KvPulled, StepDone
from hadal.core.seams import (
    MAX_STEPS_IN_FLIGHT,
    DiskNews,
    Effect,
    Event,
    Execute,
    RankReset,
    Send,
    Tick,
)
from hadal.policy.decode_moves import MoveTerms, terms_of
from hadal.roles.decode_arrivals import DecodeArrivals
from hadal.roles.decode_plans import join_of, make_plans, step_balance
from hadal.roles.decode_slots import DecodeSlots
from hadal.roles.decode_table import Bools, DecodeTable, Ints, SlotState
from hadal.roles.ending import LENGTH, STOP
from hadal.roles.meters import BalanceMeter, LineMeter
from hadal.roles.rank_pools import RankPools
from hadal.roles.reasons import RANK_LOST, void
from hadal.roles.schedule import AUTO as AUTO_OVERLAP
from hadal.roles.schedule import Choice, StepScheduler
from hadal.roles.tracer import Tracer
from hadal.roles.unit import UnitReporter


@dataclass(frozen=True, slots=True)
class _InFlight:
    step_id: int
    computed: Bools
    """By slot: whether the plan computes it."""
    num_computed: int


class DecodeLeader:
    """`max_context` is the longest prompt and output together; it bounds a request's list of
    blocks.

    `num_blocks` and `num_slots` are those of one rank; keys of StepDone are rank * num_slots + the
    rank's slot. `request_balance`: see UnitsConfig. `terms`: when a move pays, as far as measured
    steps do not say it better. `lease_s`: how long a seat is kept for a prompt of which nothing is
    heard. `fingerprint`: see kv/names; empty where no blocks are kept on disk.
    """

    def __init__(
        self,
        unit: str,
        epoch: str,
        num_blocks: int,
        *,
        num_slots: int,
        num_waiting_max: int,
        max_context: int,
        heartbeat_s: float,
        num_ranks: int = 1,
        overlap: str = AUTO_OVERLAP,
        min_split_tokens: int = 32,
        num_layers: int = 0,
        num_moe_layers: int = 0,
        request_balance: str = AUTO,
        terms: MoveTerms | None = None,
        lease_s: float = 30.0,
        fingerprint: str = "",
    ) -> None:
        self.blocks = RankPools(num_blocks, num_ranks)
        self.slots = DecodeSlots(
            self.blocks,
            num_slots,
            max_context,
            self._give_back,
            request_balance=request_balance,
            fingerprint=fingerprint,
        )
        self.arrivals = DecodeArrivals(
            unit,
            self.slots,
            self.blocks,
            num_waiting_max=num_waiting_max,
            lease_s=lease_s,
            emit=self._emit,
            give_back=self._give_back,
        )
        self._known_terms = MoveTerms() if terms is None else terms
        self.scheduler = StepScheduler(
            num_ranks,
            overlap,
            min_split_tokens,
            num_layers=num_layers,
            num_moe_layers=num_moe_layers,
        )
        self._unit = unit
        self._in_flight: deque[_InFlight] = deque()
        self._num_plans = 0
        self._second: tuple[tuple[int, ...], ...] | None = None
        """By rank, slots of the second micro-batch; kept while nobody joins or leaves: all grow
        alike.
        """
        self._reporter = UnitReporter(
            unit,
            DECODE,
            epoch,
            self.blocks,
            num_slots,
            heartbeat_s,
            self.slots.cache.totals,
            held=lambda: self.slots.held.tickets,
        )
        self._balance = BalanceMeter(self._reporter.balance)
        self._line = LineMeter()
        self._tracer = Tracer(unit)
        self._out: list[Effect] = []

    @property
    def table(self) -> DecodeTable:
        return self.slots.table

    def start(self, now_s: float) -> list[Effect]:
        """The first effects of the process: say that the unit is up."""
        return [*self._reporter.up(), *self._beat(now_s)]

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        """Take in what happened, in order, and return what to do, in order: one look at the unit
        for all of it.
        """
        self._out = []
        for event in events:
            self._take(now_s, event)
        self.arrivals.expire(now_s)
        self.slots.held.expire(now_s)
        self._plan()
        if not self.slots.is_starved:
            self.arrivals.seat_waiting()
        self._out += self.slots.cache.stores.begin()
        # Before the plans and pulls of this event, which may write these blocks.
        self._out[:0] = self.blocks.take_freed()
        self._out += self._beat(now_s)
        return self._out

    def _take(self, now_s: float, event: Event) -> None:
        match event:
            case StepDone():
                self._step_done(event)
            case Decode():
                self.arrivals.accept(event)
            case Ahead():
                self.arrivals.hint(now_s, event)
            case KvPulled():
                self._pulled(event)
            case Cancel(request_id, attempt):
                self._cancel((request_id, attempt))
            case Stop(tickets):
                for slot in self.slots.slots_of(tickets):
                    self.slots.close(slot, self._done_step_id)
            case RankReset():
                self._reset(now_s, event)
            case Resume():
                self._resume(event)
            case FrontUp():
                self._front_up(event)
            case BlocksStored():
                self.slots.cache.stores.stored(event)
            case DiskNews():
                self.slots.cache.stores.news(event)
            case AuditRequest(reply_id):
                problems = tuple(self.audit())
                answer = Audit(
                    self._unit, reply_id, self.blocks.num_used, self.num_requests, problems
                )
                self._out.append(Send("front", answer))
            case TraceRequest():
                self._out += self._tracer.ask(event)
            case Tick():
                pass  # What is due by now is seen to below, as after any event.
            case _:
                raise InvariantError(
                    f"{self._unit}: a decode leader cannot take {type(event).__name__}"
                )

    def _beat(self, now_s: float) -> list[Effect]:
        return self._reporter.beat(now_s, self.num_requests, 0, self.arrivals.next_deadline_s)

    def _emit(self, effect: Effect) -> None:
        self._out.append(effect)

    # ---- what comes in ----
    def _pulled(self, pulled: KvPulled) -> None:
        key = (pulled.request_id, pulled.attempt)
        if key in self.slots.moving.arriving:
            self.slots.moving.pulled(key, pulled.error)
            self._reporter.num_requests_moved = self.slots.moving.num_moved
            return
        self.arrivals.pulled(pulled)

    def _cancel(self, key: Key) -> None:
        self.arrivals.cancel(key)
        slot = self.slots.key_to_slot.get(key)
        if slot is not None:
            self.slots.close(slot, self._done_step_id)

    @property
    def _done_step_id(self) -> int:
        return self._in_flight[0].step_id - 1 if self._in_flight else self._num_plans - 1

    def _front_up(self, event: FrontUp) -> None:
        """What an earlier front wanted is nobody's. What ranks hold since an earlier leader may be
        the first one's.
        """
        is_first = not self._reporter.has_front
        if self._reporter.is_new_front(event):
            self.arrivals.clear()
            for slot in self.slots.key_to_slot.copy().values():
                self.slots.close(slot, self._done_step_id)
            if not is_first:
                self.slots.held.release()
        self._out += self._reporter.up()

    def _resume(self, event: Resume) -> None:
        """Go on with what an earlier leader's requests left on the ranks."""
        for generation in event.generations:
            if not self.slots.resume(generation):
                self._give_back((generation.request_id, generation.attempt), RANK_LOST)
        if event.is_last:
            self.slots.held.release()

    def _reset(self, now_s: float, event: RankReset) -> None:
        """The unit formed anew: nothing in flight will be done, and lost ranks' requests go
        elsewhere.
        """
        num_void: Ints = np.zeros(self.table.num_slots, np.int64)
        for step in self._in_flight:
            num_void += step.computed
        self._in_flight.clear()
        self._second = None
        self.scheduler.reset()
        self._tracer.reset()
        self._balance.reset()
        for rank in self.blocks.lost(event):
            self.slots.lose(rank)
        self.slots.roll_back(num_void)
        self.blocks.reset(event)
        self.slots.held.take(now_s, event.held)
        if not self.blocks.num_living:
            self.arrivals.refuse_all()
        self._out += self._reporter.reset()

    # ---- what comes back from the Runner ----
    def _step_done(self, done: StepDone) -> None:
        if not self._in_flight or self._in_flight[0].step_id != done.step_id:
            raise InvariantError(
                f"{self._unit}: step {done.step_id} is done, but it is not the one that runs."
            )
        step = self._in_flight.popleft()
        self._reporter.meter.done(done.elapsed_s)
        self._line.add(
            int(step.computed.reshape(self.blocks.num_ranks, -1).sum(axis=1).max()), done.elapsed_s
        )
        self._reporter.step_s, request_s = self._line.line
        self._reporter.rates_s = (request_s, 0.0)
        self.scheduler.done(done.step_id, done.op_times)
        if done.error is None:
            self._take_tokens(step, done)
        else:
            self._fail(done.error)
        for slot in self.table.releasable(done.step_id).tolist():
            self.slots.vacate(slot)
        self._out += self.slots.moving.done(done.step_id)
        self._out += self._tracer.done(done.step_id, done.events)

    def _take_tokens(self, step: _InFlight, done: StepDone) -> None:
        """Send the tokens of a step, and close the slots that drew their last one."""
        table = self.table
        slots, values = np.asarray(done.keys, np.int64), np.asarray(done.tokens, np.int64)
        if (
            len(slots) != step.num_computed
            or len(values) != len(slots)
            or not step.computed[slots].all()
        ):
            raise InvariantError(
                f"{self._unit}: step {step.step_id} drew for {done.keys}, not its plan's slots."
            )
        for slot, reason in done.failed.items():
            self._give_up(slot, reason)
        muted = table.is_muted[slots]
        if muted.any():
            slots, values = slots[~muted], values[~muted]
        # The arrays count up to the last emitted plan; the plans since this one have moved them on.
        index = table.output_index[slots] - 1
        for later in self._in_flight:
            index -= later.computed[slots]
        is_stop = table.draws_stop(slots, values) & (index >= table.min_tokens[slots])
        is_last = index + 1 >= table.max_tokens[slots]
        if self.slots.cache.is_on:
            lengths = index + table.length[slots] - table.output_index[slots] + 1
            self.slots.cache.delivered(slots, values, lengths)
        table.deliver(slots, values)
        ends = np.flatnonzero(is_stop | is_last)
        if slots.size:
            finishes = tuple((row, STOP if is_stop[row] else LENGTH) for row in ends.tolist())
            slot_to_row = (
                {slot: row for row, slot in enumerate(slots.tolist())} if done.draws else {}
            )
            draws = {
                slot_to_row[slot]: draw for slot, draw in done.draws.items() if slot in slot_to_row
            }
            self._out.append(
                Send(
                    "front",
                    Tokens(
                        self._unit,
                        table.ticket[slots].tobytes(),
                        index.tobytes(),
                        values.tobytes(),
                        finishes,
                        draws,
                    ),
                )
            )
        self.slots.end(slots[ends])

    def _fail(self, error: str) -> None:
        """A step failed: unknown are what its requests' KV holds and what became of its joins and
        leaves.
        """
        computed = self.table.slots_in(SlotState.ACTIVE, SlotState.CLOSING).tolist()
        for slot in (*computed, *self.slots.moving.in_flight()):
            self._give_up(slot, error)
        # Let the next plan empty every slot, wherever the Runner stopped. Leaving an empty slot
        # does nothing.
        self.table.is_in_runner[:] = np.repeat(self.blocks.is_living, self.slots.per_rank)

    def _give_up(self, slot: int, error: str) -> None:
        """A computed slot's token is void: give its request back, and close it."""
        if not self.table.is_muted[slot]:
            self._give_back(self.table.seat(slot).key, void(error))
        self.slots.end(np.array([slot]))

    # ---- what goes to the Runner ----
    def _plan(self) -> None:
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            table, moving, step_id = self.table, self.slots.moving, self._num_plans
            table.state[table.at_max_tokens()] = SlotState.CLOSING
            moving.call_off_late(step_id)
            if SlotState.ACTIVE not in table.state and SlotState.READY not in table.state:
                self.slots.is_starved = False
                return
            grown = self.slots.grow(self._done_step_id)
            if grown is None:
                return
            publishes = self.slots.choose_moves(step_id, self._known_terms, self._terms)
            leaves = np.flatnonzero(table.is_in_runner & (table.state != SlotState.ACTIVE)).tolist()
            table.is_in_runner[leaves] = False
            ready = table.slots_in(SlotState.READY).tolist()
            joins = [(slot, join_of(table, slot, self.slots.per_rank)) for slot in ready]
            table.state[ready], table.is_in_runner[ready] = SlotState.ACTIVE, True
            moving.joined(ready, step_id)
            computed = table.advance(step_id)
            moving.depart(publishes)
            self._in_flight.append(_InFlight(step_id, computed, int(np.count_nonzero(computed))))
            self._num_plans += 1
            work = self._work(computed)
            choice = self.scheduler.choose(step_id, work)
            if choice.num_micro_batches == 1:
                self._second = None
            elif self._second is None or joins or leaves:
                self._second = self._split(computed)
            is_traced = self._trace(step_id, choice, work)
            self._out.append(
                Execute(
                    make_plans(
                        step_id,
                        self.blocks.num_ranks,
                        self.slots.per_rank,
                        leaves,
                        joins,
                        grown,
                        publishes,
                        choice,
                        self._second,
                        self.slots.cache.fills(computed),
                        is_traced=is_traced,
                    )
                )
            )

    def _terms(self) -> MoveTerms:
        """When a move pays, by what steps took so far."""
        if not self.scheduler.is_calibrated:
            return self._known_terms
        rates = self.scheduler.rates
        active, num_living = self.table.state == SlotState.ACTIVE, self.blocks.num_living
        kv_s = rates.pair_s * float(self.table.length[active].sum()) / num_living
        request_s = rates.token_s * float(np.count_nonzero(active)) / num_living
        return terms_of(kv_s, request_s, self._reporter.meter.step_ms / 1e3, self._known_terms)

    def _work(self, computed: Bools) -> Ints:
        """[R, 2] requests of a plan and the positions that they attend to: lengths count the one it
        writes.
        """
        shape = (-1, self.slots.per_rank)
        num_requests_R = np.count_nonzero(computed.reshape(shape), axis=1)
        num_positions_R = (self.table.length * computed).reshape(shape).sum(axis=1)
        return np.stack((num_requests_R, num_positions_R), axis=1)

    def _trace(self, step_id: int, choice: Choice, work_R2: Ints) -> bool:
        """Note how balanced a plan is; whether it is recorded."""
        balance = step_balance(self.blocks.living, work_R2)
        self._balance.add(balance)
        is_traced = self._tracer.is_wanted
        if is_traced:
            num_tokens = self._in_flight[-1].num_computed
            self._tracer.planned(
                step_id, choice.schedule, choice.num_micro_batches, num_tokens, balance
            )
        return is_traced

    def _split(self, computed: Bools) -> tuple[tuple[int, ...], ...]:
        """By rank, its own slots of the second micro-batch."""
        shape = (-1, self.slots.per_rank)
        is_second_RS = self.scheduler.second_rows(
            self.table.length.reshape(shape), computed.reshape(shape)
        )
        slots = np.nonzero(is_second_RS)[1].tolist()
        ends = np.count_nonzero(is_second_RS, axis=1).cumsum().tolist()
        return tuple(tuple(slots[first:end]) for first, end in pairwise((0, *ends)))

    # ---- what the front hears ----
    def _give_back(self, key: Key, reason: str) -> None:
        self._out.append(Send("front", Returned(self._unit, *key, reason)))

    @property
    def num_requests(self) -> int:
        """Attempts of which something is held here."""
        slots = self.slots
        num_orphans = sum(
            key not in slots.key_to_slot for key in slots.moving.arriving
        )  # Until their copies end.
        return len(self.arrivals.waiting) + len(slots.key_to_slot) + num_orphans

    def audit(self) -> list[str]:
        """Problems of all ledgers; empty when table, allocators and plans in flight agree."""
        table = self.table
        problems = self.slots.check()
        if len(self._in_flight) > MAX_STEPS_IN_FLIGHT:
            problems.append(f"{len(self._in_flight)} plans are in flight")
        for step in self._in_flight:
            if (table.state[step.computed] == SlotState.FREE).any():
                problems.append(f"step {step.step_id} computes a free slot")
        if table.releasable(self._done_step_id).size:
            problems.append("a closed slot was not freed")
        return problems

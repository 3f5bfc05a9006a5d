"""Leader (scheduler) of a decode unit: pulls prefilled KV in, and steps the requests that it holds.

Two plans are in flight, so that the Runner never waits for one. Where passes of the model are
short, a plan has several (policy/passes). The leader receives a stop id one plan late; the rank
applies it immediately.

    plan k     | A B C |                     result k: B drew its stop id
    plan k+1   | A - C |  was emitted already with B in it; B's rank leaves it out
    plan k+2   | A C D |  B leaves; its blocks are free once k+1 is done

A request that ends by token count is left out in time, as that is known beforehand. Each request
belongs to a rank: `arrivals` queues it, `slots` owns its slot and blocks there, `answers` names the
blocks that it fills, and `table` has its numbers for plans. A plan is the difference to the one
before; each rank gets its own, and all ranks step together. When the unit forms anew, the plans in
flight are void: surviving requests go back to their last delivered token and join again. A leader
that took its ranks over does the same with requests that the front resumes. Independent of other
units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hadal.core.arrays import Bools, Ints
from hadal.core.balance import AUTO, OFF
from hadal.core.config import DECODE, Deployment, num_drafts_max
from hadal.core.errors import InvariantError
from hadal.core.messages.generation import Key
from hadal.core.messages.questions import Audit, AuditRequest, ExpertsRequest, TraceRequest
from hadal.core.messages.units import Cancel, Decode, FrontUp, Resume, Stop, Tokens
from hadal.core.model_config import ModelConfig
from hadal.core.plans import (
    BlocksStored,
    DecodePlan,
    Join,
    KvPulled,
    OpTime,
    StepDone,
    num_positions,
)
from hadal.core.seams import DiskNews, Effect, Event, Execute, RankReset, Send, Tick
from hadal.perf.shapes import num_moe_layers
from hadal.policy.decode_moves import MoveTerms
from hadal.policy.drafts import DraftChooser
from hadal.roles.decode.answers import AnswerCache
from hadal.roles.decode.arrivals import DecodeArrivals
from hadal.roles.decode.plans import StepNews, join_of, make_plans, of_one_pass, step_balance
from hadal.roles.decode.shape import PassTimes, SecondMicroBatch, SlotDrafts
from hadal.roles.decode.slots import DecodeSlots
from hadal.roles.decode.table import DecodeTable, SlotState
from hadal.roles.ranks.pools import RankPools
from hadal.roles.reasons import RANK_LOST, void
from hadal.roles.unit.report import ReportBuilder, UnitIdentity
from hadal.roles.unit.reporter import UnitReporter
from hadal.roles.unit.schedule import ScheduleChoice, StepScheduler
from hadal.roles.unit.steps import StepsInFlight
from hadal.roles.unit.tokens import LENGTH, STOP, returned
from hadal.roles.unit.tracing import Tracer

_NO_SLOTS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _BegunStep:
    step_id: int
    computed: Bools
    """True for slots that the plan computes, [slots]."""
    num_passes: int
    num_checked: Ints
    """Maximum number of drafts (speculative tokens) checked per slot in all passes, [slots]."""
    num_requests: int
    """Computed requests on the rank with the most."""
    num_drafts: tuple[int, int]
    """Drafts per slot: the maximum that this plan can check, and the number that it makes."""


class DecodeLeader:
    """Scheduler of a decode unit. Keys of StepDone are rank * slots per rank + the rank's slot."""

    def __init__(
        self,
        unit: str,
        epoch: str,
        deployment: Deployment,
        config: ModelConfig,
        pool_name: str = "",
        *,
        fingerprint: str = "",
        terms: MoveTerms | None = None,
    ) -> None:
        """`pool_name`, `fingerprint`: see PrefillLeader. `terms`: when a move pays, until measured
        steps give better terms.
        """
        units, cache = deployment.decode, deployment.cache
        drafts = DraftChooser(num_drafts_max(deployment, config), is_fixed=units.drafts != AUTO)
        has_disk = bool(cache.folder)
        offers_blocks = cache.memory != OFF and not deployment.cluster.spans_hosts
        self._out: list[Effect] = []
        self.blocks = RankPools(units.kv_blocks, units.ranks, pool_name)
        self.slots = DecodeSlots(
            self.blocks,
            units.max_requests,
            config.max_position_embeddings,
            unit,
            self._out,
            request_balance=units.request_balance,
            answers=AnswerCache(fingerprint if has_disk or offers_blocks else "", has_disk),
            num_drafts_max=drafts.num_max,
        )
        self.arrivals = DecodeArrivals(
            unit,
            self.slots,
            self.blocks,
            num_waiting_max=units.max_waiting,
            out=self._out,
            fingerprint=fingerprint,
        )
        self._cache = self.slots.cache
        self.scheduler = StepScheduler(
            units.ranks,
            units.overlap,
            units.min_split_tokens,
            num_layers=config.num_hidden_layers,
            num_moe_layers=num_moe_layers(config),
        )
        self._unit = unit
        self._in_flight: StepsInFlight[_BegunStep] = StepsInFlight(unit)
        self._drafts = SlotDrafts(drafts, self.slots.table.num_slots)
        self._passes = PassTimes(units.tenant_promise, terms or MoveTerms())
        self._second = SecondMicroBatch(self.scheduler, units.max_requests)
        identity = UnitIdentity(unit, DECODE, epoch, fingerprint)
        self._report = ReportBuilder(identity, self.blocks, units.max_requests, self._cache.totals)
        self._reporter = UnitReporter(
            identity,
            self.blocks,
            self._report,
            deployment.heartbeat_s,
            held=lambda: self.slots.held_ids,
        )
        self._tracer = Tracer(unit)

    @property
    def table(self) -> DecodeTable:
        return self.slots.table

    def start(self, now_s: float) -> list[Effect]:
        """Return the first effects: UnitUp, if a rank lives, and those of a heartbeat."""
        return [*self._reporter.up(), *self._heartbeat(now_s)]

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        """Process events in order, plan once for all of them, and return the effects in order."""
        self._out.clear()
        for event in events:
            self._take(now_s, event)
        self.slots.expire_held(now_s)
        self._plan()
        if not self.slots.is_starved:
            self.arrivals.fill_slots()
        self._out += self._cache.begin_stores()
        # Inserted before this call's plans and pulls, which may write freed blocks
        # (RankPools.take_freed).
        self._out[:0] = self.blocks.take_freed()
        self._out += self._heartbeat(now_s)
        return [*self._out]

    def _take(self, now_s: float, event: Event) -> None:
        match event:
            case StepDone():
                self._step_done(event)
            case Decode():
                self.arrivals.accept(event)
            case KvPulled():
                self._pulled(event)
            case Cancel(request_id, attempt):
                self._cancel((request_id, attempt))
            case Stop(attempt_ids):
                for slot in self.slots.slots_of(attempt_ids):
                    self.slots.close(slot, self._in_flight.done_id)
            case RankReset():
                self._reset(now_s, event)
            case Resume():
                self._resume(event)
            case FrontUp():
                self._front_up(event)
            case BlocksStored() | DiskNews():
                self._cache.note_disk(event)
            case AuditRequest(reply_id):
                problems = tuple(self.audit())
                answer = Audit(
                    self._unit, reply_id, self.blocks.num_used, self.num_requests, problems
                )
                self._out.append(Send("front", answer))
            case TraceRequest():
                self._out += self._tracer.ask(now_s, event)
            case ExpertsRequest():
                pass  # A single rank has all experts; with more ranks, roles/ranks answers.
            case Tick():
                pass  # `handle` does all due work after any event.
            case _:
                raise InvariantError(
                    f"{self._unit}: a decode leader cannot handle {type(event).__name__}"
                )

    def _heartbeat(self, now_s: float) -> list[Effect]:
        return self._reporter.heartbeat(now_s, self.num_requests, 0, None)

    # ---- events ----
    def _pulled(self, pulled: KvPulled) -> None:
        self._report.copied(pulled.link_bytes)
        if self.slots.moved(pulled):
            self._report.moved(self.slots.moving.num_moved)
        else:
            self.arrivals.pulled(pulled)

    def _cancel(self, key: Key) -> None:
        self.arrivals.cancel(key)
        slot = self.slots.key_to_slot.get(key)
        if slot is not None:
            self.slots.close(slot, self._in_flight.done_id)

    def _front_up(self, event: FrontUp) -> None:
        """Drop the requests of an earlier front. KV held from an earlier leader stays if this is
        the first front that this leader sees, which may resume it.
        """
        is_first = not self._reporter.has_front
        if self._reporter.is_new_front(event):
            self.arrivals.clear()
            self._tracer.forget()
            for slot in self.slots.key_to_slot.copy().values():
                self.slots.close(slot, self._in_flight.done_id)
            if not is_first:
                self.slots.release_held()
        self._out += self._reporter.up()

    def _resume(self, event: Resume) -> None:
        """Resume requests of an earlier leader on the ranks that hold their KV."""
        for generation in event.generations:
            if not self.slots.resume(generation):
                key = (generation.request_id, generation.attempt)
                self._out.append(returned(self._unit, key, RANK_LOST))
        if event.is_last:
            self.slots.release_held()

    def _reset(self, now_s: float, event: RankReset) -> None:
        """Handle a new formation: void the plans in flight, and return requests of lost ranks."""
        num_void: Ints = np.zeros(self.table.num_slots, np.int64)
        for step in self._in_flight:
            num_void += step.computed * step.num_passes
        self._in_flight.clear()
        self._second.reset()
        self._drafts.reset()
        self.scheduler.reset()
        self._tracer.reset()
        self._report.reset()
        for rank in self.blocks.lost(event):
            self.slots.lose(rank)
        self.slots.roll_back(num_void)
        self.blocks.reset(event)
        self.slots.hold(now_s, event.held)
        if not self.blocks.num_living:
            self.arrivals.refuse_all()
        self._out += self._reporter.reset()

    # ---- results of the Runner ----
    def _step_done(self, done: StepDone) -> None:
        step = self._in_flight.take(done.step_id)
        self._report.stepped(done)
        if done.error is None:
            self._take_tokens(step, done)
        else:
            self.scheduler.done(done.step_id, ())
            self._fail(done.error)
            self.table.settle(step.num_checked, _NO_SLOTS, _NO_SLOTS)
        for slot in self.table.releasable(done.step_id).tolist():
            self.slots.vacate(slot)
        self._out += self.slots.moving.done(done.step_id)
        self._out += self._tracer.done(done)

    def _learn(self, step: _BegunStep, done: StepDone, *, is_whole: bool) -> None:
        """Note the time of a pass and the drafts that were right. `is_whole` is False if a request
        drew a stop id before the last pass: then the step's time is not used, only its drafts
        count.
        """
        seconds: list[float] = []
        op_times: tuple[OpTime, ...] = ()
        if is_whole:
            seconds = [done.elapsed_s / step.num_passes] * step.num_passes
            op_times = of_one_pass(done.op_times, step.num_passes)
            self._passes.add(step.num_requests, step.num_passes, done.elapsed_s)
            pass_s, request_s = self._passes.line
            self._report.measured(request_s, 0.0, step_s=pass_s)
        self.scheduler.done(done.step_id, op_times)
        self._drafts.done(step.num_requests, step.num_drafts, seconds, done.drafts)
        self._report.drafted(*self._drafts.counts)

    def _take_tokens(self, step: _BegunStep, done: StepDone) -> None:
        """Send the tokens of a step, and close slots that drew their last token."""
        table = self.table
        slots, values = np.asarray(done.keys, np.int64), np.asarray(done.tokens, np.int64)
        ahead, num_drawn = self._ordered(slots, values, step)
        is_whole = bool((num_drawn[step.computed] >= step.num_passes).all())
        self._learn(step, done, is_whole=is_whole)
        for slot, reason in done.failed.items():
            self._give_up(slot, reason)
        # The arrays count up to the last emitted plan: later plans have advanced them already.
        index = table.output_index[slots] - step.num_passes + ahead
        for later in self._in_flight:
            index -= later.num_passes * later.computed[slots]
        is_stop = table.stops.are_drawn(slots, values) & (index >= table.min_tokens[slots])
        is_end = is_stop | (index + 1 >= table.max_tokens[slots])
        # Drop tokens of ended requests, and tokens after a request's last one.
        is_kept = ~table.is_muted[slots]
        if ahead.any():
            num_kept = np.full(table.num_slots, len(slots))
            np.minimum.at(num_kept, slots[is_end], ahead[is_end] + 1)
            is_kept &= ahead < num_kept[slots]
        drawn = np.flatnonzero(step.computed)
        table.settle(step.num_checked, drawn, num_drawn[drawn] - step.num_passes)
        rows = np.flatnonzero(is_kept)
        if not rows.size:
            return
        slots, values, index, ahead = slots[rows], values[rows], index[rows], ahead[rows]
        if self._cache.is_on:
            lengths = index + table.length[slots] - table.output_index[slots] + 1
            for turn in range(int(ahead.max()) + 1):
                now = ahead == turn
                self._cache.delivered(slots[now], values[now], lengths[now])
        table.deliver(slots, values)
        ends = np.flatnonzero(is_end[rows])
        finishes = tuple((row, STOP if is_stop[rows[row]] else LENGTH) for row in ends.tolist())
        draws = {}
        if done.draws:
            draws = {
                row: done.draws[drawn_row]
                for row, drawn_row in enumerate(rows.tolist())
                if drawn_row in done.draws
            }
        attempt_ids = table.attempt_id[slots].tobytes()
        told = index.tobytes(), values.tobytes(), finishes, draws
        # Filled is sent before the last token, so that it reaches prefill before any follow-up
        # prompt.
        self.slots.end(slots[ends])
        self._out.append(Send("front", Tokens(self._unit, attempt_ids, *told)))

    def _ordered(self, slots: Ints, values: Ints, step: _BegunStep) -> tuple[Ints, Ints]:
        """Return each token's index among its slot's tokens of the step, and the number of tokens
        per slot, [slots]. Raises InvariantError if they do not fit the step's plan.
        """
        num_drawn = np.bincount(slots, minlength=self.table.num_slots)
        most = step.computed * (step.num_passes + step.num_checked)
        # A rank stops computing a request that drew a stop id.
        has_ended = self.table.is_muted.copy()
        has_ended[slots[self.table.stops.are_drawn(slots, values)]] = True
        fewest = (step.computed & ~has_ended) * step.num_passes
        if (
            len(values) != len(slots)
            or len(num_drawn) != len(most)
            or (num_drawn < fewest).any()
            or (num_drawn > most).any()
        ):
            raise InvariantError(
                f"{self._unit}: step {step.step_id} drew for {slots.tolist()}, unlike its plan."
            )
        if num_drawn.max(initial=0) <= 1:
            return np.zeros(len(slots), np.int64), num_drawn
        order = np.argsort(slots, kind="stable")
        firsts = np.cumsum(num_drawn) - num_drawn
        ahead = np.empty(len(slots), np.int64)
        ahead[order] = np.arange(len(slots)) - firsts[slots[order]]
        return ahead, num_drawn

    def _fail(self, error: str) -> None:
        """Handle a failed step: the KV of its requests, and its joins and leaves, are unknown."""
        computed = self.table.slots_in(SlotState.ACTIVE, SlotState.CLOSING).tolist()
        for slot in (*computed, *self.slots.moving.in_flight()):
            self._give_up(slot, error)
        # The next plan empties every slot, as it is unknown where the Runner stopped. A leave
        # of an empty slot does nothing.
        self.table.is_in_runner[:] = np.repeat(self.blocks.is_living, self.slots.per_rank)

    def _give_up(self, slot: int, error: str) -> None:
        """Return a computed slot's request to the front, as its token is void, and close the slot."""
        if not self.table.is_muted[slot]:
            key = self.table.occupant(slot).key
            self._out.append(returned(self._unit, key, void(error)))
        self.table.is_named[slot] = False  # Blocks that it filled may be void, too.
        self.slots.end(np.array([slot]))

    # ---- plans for the Runner ----
    def _plan(self) -> None:
        while not self._in_flight.is_full and self._plan_next():
            pass

    def _plan_next(self) -> bool:
        """Make the next plan; return False if there is nothing to compute, or if blocks are missing."""
        table, moving, step_id = self.table, self.slots.moving, self._in_flight.next_id
        table.state[table.at_max_tokens()] = SlotState.CLOSING
        moving.call_off_late(step_id)
        if not table.in_next().any():
            self.slots.is_starved = False
            return False
        self._passes.choose_resting(table, self.slots.per_rank, step_id)
        computed = table.computed_next()
        num_requests = int(computed.reshape(-1, self.slots.per_rank).sum(axis=1).max())
        num_drafts = self._drafts.choose(num_requests)
        num_before = self._drafts.most_made(computed & (table.state == SlotState.ACTIVE))
        num_passes = self._num_passes(num_requests, num_drafts, num_before)
        # `grow` adds one position itself. The drafts of the last pass need further positions.
        num_more = num_positions(num_passes, num_before, num_drafts) - 1 + num_drafts
        grown = self.slots.grow(self._in_flight.done_id, num_more)
        if grown is None:
            return False
        if not table.computed_next().any():  # All slots to compute were preempted.
            return self._plan_next()
        publishes = self.slots.choose_moves(step_id, self._passes.known_terms, self._terms)
        # One pass while a request moves: it rests for some plans, and the blocks at its target are
        # reserved for one token per plan.
        num_passes = 1 if len(moving) else min(num_passes, table.most_passes(num_drafts))
        leaves, joins = self._change_rows()
        ready = [slot for slot, _ in joins]
        moving.joined(ready, step_id)
        self._drafts.join(ready)
        num_checked = self._drafts.num_checked(table, num_passes, num_drafts)
        computed = table.advance(step_id, num_checked, num_passes)
        num_checked *= computed
        resting = np.flatnonzero(table.rests & (table.state == SlotState.ACTIVE)).tolist()
        moving.depart(publishes)
        step = _BegunStep(
            step_id,
            computed,
            num_passes,
            num_checked,
            num_requests,
            (num_before, num_drafts),
        )
        self._in_flight.add(step)
        self._drafts.planned(computed, num_drafts, num_requests, num_passes)
        self._report.drafts(num_drafts)
        self._execute(step, StepNews(leaves, joins, grown, publishes, resting))
        return True

    def _execute(self, step: _BegunStep, news: StepNews) -> None:
        """Send a step's plans to the ranks."""
        # `num_checked` is a sum over passes; each pass checks only what one pass drafts.
        work = self._work(step.computed, np.minimum(step.num_checked, max(step.num_drafts)))
        choice = self.scheduler.choose(step.step_id, work)
        if choice.num_micro_batches == 1:
            self._second.reset()
        else:
            second = self._second.choose(
                self.table.length, step.computed, has_joins=bool(news.joins)
            )
            news = replace(news, second=second)
        same = DecodePlan(
            step.step_id,
            (),
            (),
            (),
            choice.schedule,
            (),
            choice.num_micro_batches,
            self._trace(step, choice, work),
            publishes_full=self._cache.is_on,
            num_drafts=step.num_drafts[1],
            num_passes=step.num_passes,
        )
        plans = make_plans(same, self.blocks.num_ranks, self.slots.per_rank, news)
        self._out.append(Execute(plans))

    def _change_rows(self) -> tuple[list[int], list[tuple[int, Join]]]:
        """Remove finished slots from the Runner's table and add ready ones; return leaves and joins."""
        table = self.table
        leaves = np.flatnonzero(table.is_in_runner & (table.state != SlotState.ACTIVE)).tolist()
        table.is_in_runner[leaves] = False
        ready = table.slots_in(SlotState.READY).tolist()
        joins = [(slot, join_of(table, slot, self.slots.per_rank)) for slot in ready]
        table.state[ready], table.is_in_runner[ready] = SlotState.ACTIVE, True
        table.turn[ready] = table.turn.max() + 1 + np.arange(len(ready))
        return leaves, joins

    def _num_passes(self, num_requests: int, num_drafts: int, num_before: int) -> int:
        """Return the number of passes of the next plan: 1 if it is traced, or if it makes more or
        fewer drafts than it checks.
        """
        if num_drafts != num_before or self._tracer.is_wanted:
            return 1
        return min(self._passes.num_wanted(num_requests), self._drafts.num_passes_max)

    def _terms(self) -> MoveTerms:
        """Return the terms on which a move pays, from the measured times of steps."""
        if not self.scheduler.is_calibrated:
            return self._passes.known_terms
        rates = self.scheduler.rates
        active, num_living = self.table.state == SlotState.ACTIVE, self.blocks.num_living
        kv_s = rates.pair_s * float(self.table.length[active].sum()) / num_living
        request_s = rates.token_s * float(np.count_nonzero(active)) / num_living
        return self._passes.terms(kv_s, request_s)

    def _work(self, computed: Bools, num_checked: Ints) -> Ints:
        """Return [R, 2]: tokens of a plan, drafts included, and the positions that they attend to.
        Lengths include the position that the plan writes.
        """
        num_tokens = computed + num_checked
        parts = num_tokens, self.table.length * num_tokens
        sums = [part.reshape(-1, self.slots.per_rank).sum(axis=1) for part in parts]
        return np.stack(sums, axis=1)

    def _trace(self, step: _BegunStep, choice: ScheduleChoice, work_R2: Ints) -> bool:
        """Note how balanced a plan is, and return whether it is traced."""
        balance = step_balance(self.blocks.living, work_R2)
        self._report.balanced(balance)
        is_traced = self._tracer.is_wanted
        if is_traced:
            num_tokens = int(np.count_nonzero(step.computed)) + int(step.num_checked.sum())
            self._tracer.planned(
                step.step_id, choice.schedule, choice.num_micro_batches, num_tokens, balance
            )
        return is_traced

    # ---- reports ----
    @property
    def num_requests(self) -> int:
        """Number of attempts that are queued or hold a slot."""
        return len(self.arrivals.waiting) + self.slots.num_requests

    def audit(self) -> list[str]:
        """Return problems of all ledgers; empty if table, allocators and plans in flight agree."""
        table = self.table
        problems = self.slots.check() + self._in_flight.check()
        for step in self._in_flight:
            if (table.state[step.computed] == SlotState.FREE).any():
                problems.append(f"step {step.step_id} computes a free slot")
        if table.releasable(self._in_flight.done_id).size:
            problems.append("a closed slot was not freed")
        return problems

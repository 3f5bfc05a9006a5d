"""Leader (scheduler) of a prefill unit: turns prompts into first tokens, and leases their KV to
decode.

    waiting --start, with all blocks--> started --last chunk planned, StepDone--> leased --> gone

A started prompt takes no part in steps while its prefix is read from disk. Prompts start in their
turn (policy/batching), each on one rank; all ranks step together. Two plans may be in flight, so a
prompt's next chunk is planned while the one before is computed. When the unit forms anew, the plans
in flight are void: their chunks are planned again. Independent of other units: the front sends
prompts and handles the results. roles/prefill/cache finds the parts of a prompt that need not be
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from hadal.core.balance import AUTO, OFF, TURNS
from hadal.core.config import PREFILL, Deployment
from hadal.core.errors import InvariantError
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation, Key, Token, text_of
from hadal.core.messages.questions import Audit, AuditRequest, ExpertsRequest, TraceRequest
from hadal.core.messages.units import Filled, FrontUp, KvLease, Prefill, PrefillDone, Release
from hadal.core.model_config import ModelConfig
from hadal.core.plans import BlocksRead, BlocksStored, Draw, KvPulled, PrefillPlan, StepDone
from hadal.core.seams import DiskNews, Effect, Event, Execute, RankReset, Send, Tick
from hadal.kv.blocks import blocks_for
from hadal.kv.disk_index import BlockIndex
from hadal.kv.leases import HeldLease, Leases
from hadal.perf.shapes import num_moe_layers
from hadal.roles.prefill.cache import PrefillCache
from hadal.roles.prefill.prompts import (
    PackRules,
    PrefillAttempt,
    PromptChunk,
    cut,
    pack,
    step_balance,
    work_on,
)
from hadal.roles.prefill.queue import PrefillQueue
from hadal.roles.ranks.pools import RankPools
from hadal.roles.reasons import LEASE_EXPIRED, OTHER_WEIGHTS, QUEUE_FULL, RANK_LOST, TOO_LONG, void
from hadal.roles.unit.report import ReportBuilder, UnitIdentity
from hadal.roles.unit.reporter import UnitReporter
from hadal.roles.unit.schedule import ScheduleChoice, StepScheduler
from hadal.roles.unit.steps import StepsInFlight
from hadal.roles.unit.tokens import finish_of, has_other_weights, returned
from hadal.roles.unit.tracing import Tracer


@dataclass(frozen=True, slots=True)
class _PrefillStep:
    step_id: int
    parts: tuple[PromptChunk, ...]
    """Chunks of all ranks and their micro-batches, in the order of StepDone's keys."""
    fetches: tuple[tuple[int, ...], ...]
    """Blocks read from disk or copied from decode that the step fetches, by rank."""


class PrefillLeader:
    """Scheduler of a prefill unit. Keys of StepDone number the chunks of all ranks' plans one after
    another; a rank's second micro-batch follows its first.
    """

    def __init__(
        self,
        unit: str,
        epoch: str,
        deployment: Deployment,
        config: ModelConfig,
        pool_name: str = "",
        *,
        fingerprint: str = "",
        index: BlockIndex | None = None,
    ) -> None:
        """`pool_name`: KV pool of a unit that is one process, new at every start (else each rank
        has its own). `fingerprint`: KV fingerprint (UnitUp). `index`: blocks known to be on disk;
        None: none yet.
        """
        units, cache = deployment.prefill, deployment.cache
        self._out: list[Effect] = []
        self.blocks = RankPools(
            units.kv_blocks, units.ranks, pool_name, reports_names=units.ranks > 1
        )
        self.cache = PrefillCache(
            unit,
            epoch,
            self.blocks,
            self._out,
            keeps=cache.memory != OFF,
            has_disk=bool(cache.folder),
            recompute=cache.recompute,
            index=index,
        )
        self.leases = Leases()
        self.scheduler = StepScheduler(
            units.ranks,
            units.overlap,
            units.min_split_tokens,
            num_layers=config.num_hidden_layers,
            num_moe_layers=num_moe_layers(config),
        )
        self._identity = UnitIdentity(unit, PREFILL, epoch, fingerprint)
        # A single rank needs no balance: a token budget fills its steps as well, and plans faster.
        self._rules = PackRules(
            deployment.chunk_tokens,
            units.max_requests,
            is_by_cost=units.request_balance == AUTO and units.ranks > 1,
            is_in_turn=units.request_balance == TURNS,
        )
        self._lease_s = deployment.lease_s
        self._waiting = PrefillQueue(units.max_waiting, deployment.limits.burst_tokens)
        self._started: dict[Key, PrefillAttempt] = {}
        self._num_tokens_left: int | None = None
        """Unplanned tokens of queued and started prompts; None: to be counted again."""
        self._in_flight: StepsInFlight[_PrefillStep] = StepsInFlight(unit)
        self._report = ReportBuilder(
            self._identity, self.blocks, units.max_requests, self.cache.totals
        )
        self._reporter = UnitReporter(
            self._identity, self.blocks, self._report, deployment.heartbeat_s
        )
        self._tracer = Tracer(unit)

    def start(self, now_s: float) -> list[Effect]:
        """Return the first effects: UnitUp, if a rank lives, and those of a heartbeat."""
        return [*self._reporter.up(), *self._heartbeat(now_s)]

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        """Process events in order, plan once for all of them, and return the effects in order."""
        self._out.clear()
        for event in events:
            self._take(now_s, event)
            if not isinstance(
                event, Prefill | Release | Filled | KvPulled
            ):  # These are most events, and update the count themselves or do not change it.
                self._num_tokens_left = None
        for lease in self.leases.expired(now_s):
            self._free_lease(lease)
            self._give_back((lease.request_id, lease.attempt), LEASE_EXPIRED)
        for prompt in self.cache.give_up(now_s):
            self._give_back(prompt.key, QUEUE_FULL)
            self._free_started(prompt)
            self._num_tokens_left = None
        self._out += self.blocks.take_freed()
        self._out += self.blocks.take_named()
        self._plan(now_s)
        self.cache.end_event()
        self._out += self._heartbeat(now_s)
        return [*self._out]

    def _take(self, now_s: float, event: Event) -> None:
        match event:
            case Prefill(generation):
                self._accept(generation)
            case StepDone():
                self._step_done(now_s, event)
            case Release(request_id, attempt):
                self._drop((request_id, attempt))
            case FrontUp():
                if self._reporter.is_new_front(event):
                    self._drop_everything()
                    self._tracer.forget()
                self._out += self._reporter.up()
                self.cache.say_all()
            case RankReset():
                self._reset(event)
            case Filled():
                first = self._waiting.first
                num_blocks_next = 0 if first is None else blocks_for(len(first.tokens))
                self.cache.take(now_s, event, num_blocks_next)
            case KvPulled():
                self._report.copied(event.link_bytes)
                self.cache.taken(event)
            case BlocksRead():
                self.cache.loaded(now_s, event)
            case BlocksStored() | DiskNews():
                self.cache.note_disk(event)
            case AuditRequest(reply_id):
                self._out.append(Send("front", self._answer(reply_id)))
            case TraceRequest():
                self._out += self._tracer.ask(now_s, event)
            case ExpertsRequest():
                pass  # A single rank has all experts; with more ranks, roles/ranks answers.
            case Tick():
                pass  # `handle` does all due work after any event.
            case _:
                raise InvariantError(
                    f"{self._identity.unit}: a prefill leader cannot handle {type(event).__name__}"
                )

    # ---- events ----
    def _accept(self, generation: Generation) -> None:
        prompt = PrefillAttempt(generation, text_of(generation), number=self._waiting.num_arrived)
        if prompt.key in self._waiting or prompt.key in self._started or prompt.key in self.leases:
            return  # A duplicate message.
        num_starts = self._rules.num_requests_max * self.blocks.num_living
        if has_other_weights(generation, self._identity.fingerprint):
            self._give_back(prompt.key, OTHER_WEIGHTS)
        elif blocks_for(len(prompt.tokens)) > self.blocks.num_blocks_rank:
            self._give_back(prompt.key, f"{TOO_LONG}: {len(prompt.tokens)} tokens")
        elif not self._waiting.has_room(num_starts) or not self.blocks.num_living:
            self._give_back(prompt.key, QUEUE_FULL)
        else:
            self._waiting.add(prompt)
            if self._num_tokens_left is not None:
                self._num_tokens_left += prompt.num_left

    def _drop(self, key: Key) -> None:
        if self._waiting.take(key) is not None:
            self._num_tokens_left = None
        lease = self.leases.release(*key)
        if lease is not None:
            self._free_lease(lease)
        prompt = self._started.get(key)
        if prompt is not None:
            prompt.is_dropped = True
            self._num_tokens_left = None
            self._free_if_done(prompt)

    def _drop_everything(self) -> None:
        self._waiting.clear()
        for lease in self.leases.clear():
            self._free_lease(lease)
        for prompt in list(self._started.values()):
            prompt.is_dropped = True
            self._free_if_done(prompt)

    def _free_if_done(self, prompt: PrefillAttempt) -> None:
        """Free a dropped prompt's blocks unless a plan in flight still writes them."""
        if prompt.is_dropped and not any(
            prompt.last_step_id == step.step_id for step in self._in_flight
        ):
            self._free_started(prompt)

    def _free_started(self, prompt: PrefillAttempt) -> None:
        del self._started[prompt.key]
        self.blocks.free(prompt.rank, prompt.block_ids, prompt.key)
        if prompt.is_loading:
            self.cache.abandon(prompt)

    def _free_lease(self, lease: HeldLease) -> None:
        self.blocks.free(lease.rank, lease.block_ids, (lease.request_id, lease.attempt))

    def _reset(self, event: RankReset) -> None:
        """Handle a new formation: void the plans in flight, and return attempts of lost ranks."""
        for step in self._in_flight:
            for part in step.parts:
                part.prompt.num_planned = min(part.prompt.num_planned, part.start)
            self.cache.fetch_again(step.fetches)
        self._in_flight.clear()
        self.scheduler.reset()
        self._tracer.reset()
        self._report.reset()
        lost = self.blocks.lost(event)
        for prompt in list(self._started.values()):
            if prompt.rank in lost and not prompt.is_dropped:
                self._give_back(prompt.key, RANK_LOST)
            if prompt.rank in lost or prompt.is_dropped:
                self._free_started(prompt)
        for lease in [lease for rank in lost for lease in self.leases.lose(rank)]:
            self._free_lease(lease)
            self._give_back((lease.request_id, lease.attempt), RANK_LOST)
        self.cache.lose(lost)
        self.blocks.reset(event)
        if not self.blocks.num_living:
            for prompt in self._waiting:
                # Another unit may have capacity; this one will not soon.
                self._give_back(prompt.key, QUEUE_FULL)
            self._waiting.clear()
        self._out += self._reporter.reset()

    # ---- results of the Runner ----
    def _step_done(self, now_s: float, done: StepDone) -> None:
        step = self._in_flight.take(done.step_id)
        self._report.stepped(done)
        self.scheduler.done(done.step_id, done.op_times)
        if self.scheduler.is_calibrated:
            rates = self.scheduler.rates
            self._report.measured(rates.all_token_s, rates.pair_s, step_s=0.0)
        if done.error is not None:
            self.cache.fetch_again(step.fetches)
            for part in step.parts:
                self._give_up(part.prompt, done.error)
        else:
            expected = {
                key for key, part in enumerate(step.parts) if part.end == len(part.prompt.tokens)
            }
            if (
                len(done.keys) != len(expected)
                or set(done.keys) != expected
                or len(done.tokens) != len(done.keys)
            ):
                raise InvariantError(
                    f"{self._identity.unit}: step {done.step_id} returned {len(done.tokens)} tokens for"
                    f" chunks {done.keys}; expected one for each of {sorted(expected)}."
                )
            self._written(step, {id(step.parts[key].prompt) for key in done.failed})
            for key, scores in done.scores.items():
                step.parts[key].prompt.start_to_scores[step.parts[key].start] = scores
            for row, (key, token) in enumerate(zip(done.keys, done.tokens, strict=True)):
                prompt = step.parts[key].prompt
                if key in done.failed:
                    self.cache.failed(prompt)
                    self._give_up(prompt, done.failed[key])
                elif not prompt.is_dropped:
                    self._first_token(now_s, prompt, token, done.draws.get(row))
        for part in step.parts:
            if part.prompt.key in self._started:
                self._free_if_done(part.prompt)
        self._out += self._tracer.done(done)

    def _written(self, step: _PrefillStep, void: set[int]) -> None:
        """Note that a step's chunks are in their blocks. `void`: id() of prompts with a void token;
        their blocks get no names.
        """
        for part in step.parts:
            part.prompt.num_done = max(part.prompt.num_done, part.end)
        for prompt in {id(part.prompt): part.prompt for part in step.parts}.values():
            if not prompt.is_dropped and id(prompt) not in void:
                self.cache.written(prompt)

    def _give_up(self, prompt: PrefillAttempt, error: str) -> None:
        if not prompt.is_dropped:
            self._give_back(prompt.key, void(error))
            prompt.is_dropped = True

    def _first_token(
        self, now_s: float, prompt: PrefillAttempt, value: int, draw: Draw | None
    ) -> None:
        generation, index = prompt.generation, len(prompt.generation.output)
        self.cache.finished(prompt)
        token = Token(
            generation.request_id,
            generation.attempt,
            index,
            value,
            finish_of(generation, index, value),
            draw.logprob if draw else None,
            draw.top if draw else (),
        )
        lease = None
        if token.finish is None:
            # The blocks are never without an owner: the attempt owns them as a prompt and then as a
            # lease, until decode has pulled them (Release) or the lease expires.
            del self._started[prompt.key]
            self.leases.open(
                HeldLease(*prompt.key, prompt.block_ids, now_s + self._lease_s, prompt.rank)
            )
            lease = KvLease(
                self.blocks.names[prompt.rank],
                prompt.block_ids,
                self.blocks[prompt.rank].versions(prompt.block_ids),
                len(prompt.tokens),
            )
        else:
            prompt.is_dropped = True  # Freed by the caller: this was its last plan.
        prefix = prompt.prefix
        done = PrefillDone(
            self._identity.unit,
            token,
            lease,
            prefix.num_blocks * BLOCK_TOKENS,
            prompt.scores,
            prefix.num_recomputed * BLOCK_TOKENS,
        )
        self._out.append(Send("front", done))

    # ---- plans for the Runner ----
    def _plan(self, now_s: float) -> None:
        while not self._in_flight.is_full:
            rates = self.scheduler.rates
            finder = self.cache.finder(now_s, rates if self.scheduler.is_calibrated else None)
            started = self._started.values()
            ready = self._waiting.in_turns(self.cache.ready(now_s, self._waiting), started)
            step = pack(started, ready, self.blocks, self._rules, rates, finder.find)
            if step.starts or any(step.parts):
                self._num_tokens_left = None
            self.cache.start(now_s, step.starts)
            for prompt, _, _ in step.starts:
                self._waiting.start(prompt)
                self._started[prompt.key] = prompt
            if not any(step.parts):
                return
            step_id = self._in_flight.next_id
            for part in chain.from_iterable(step.parts):
                part.prompt.num_planned, part.prompt.last_step_id = part.end, step_id
            works = [work_on(parts) for parts in step.parts]
            choice = self.scheduler.choose(step_id, works)
            halves: list[tuple[Sequence[PromptChunk], Sequence[PromptChunk]]] = [
                (parts, ()) for parts in step.parts
            ]
            if choice.num_micro_batches == 2:
                halves = [
                    cut(
                        parts,
                        self.scheduler.cut_chunks(
                            [(part.start, part.end - part.start) for part in parts]
                        ),
                    )
                    for parts in step.parts
                ]
            flat = tuple(part for first, second in halves for part in chain(first, second))
            fetches = tuple(self.cache.take_fetches(rank) for rank in range(self.blocks.num_ranks))
            planned = _PrefillStep(step_id, flat, fetches)
            self._in_flight.add(planned)
            self._out.append(Execute(self._plans(planned, halves, choice, works)))

    def _plans(
        self,
        step: _PrefillStep,
        halves: Sequence[tuple[Sequence[PromptChunk], Sequence[PromptChunk]]],
        choice: ScheduleChoice,
        works: Sequence[tuple[int, int]],
    ) -> tuple[PrefillPlan, ...]:
        """Return the step's plans, one per rank. `works`: tokens and pairs by rank."""
        balance = step_balance([works[rank] for rank in self.blocks.living], self.scheduler.rates)
        self._report.balanced(balance)
        is_traced = self._tracer.is_wanted
        if is_traced:
            num_tokens = sum(num_tokens for num_tokens, _ in works)
            self._tracer.planned(
                step.step_id, choice.schedule, choice.num_micro_batches, num_tokens, balance
            )
        return tuple(
            PrefillPlan(
                step.step_id,
                tuple(part.chunk() for part in first),
                choice.schedule,
                tuple(part.chunk() for part in second),
                choice.num_micro_batches,
                is_traced,
                fetches=fetches,
            )
            for (first, second), fetches in zip(halves, step.fetches, strict=True)
        )

    # ---- reports ----
    def _give_back(self, key: Key, reason: str) -> None:
        self._out.append(returned(self._identity.unit, key, reason))

    @property
    def num_requests(self) -> int:
        """Number of attempts that are queued, started or leased."""
        return len(self._waiting) + len(self._started) + len(self.leases)

    def _heartbeat(self, now_s: float) -> list[Effect]:
        if self._num_tokens_left is None:
            self._num_tokens_left = self._count_left()
        deadlines_s = [
            s
            for s in (self.leases.next_deadline_s, self.cache.next_deadline_s(now_s))
            if s is not None
        ]
        return self._reporter.heartbeat(
            now_s, self.num_requests, self._num_tokens_left, min(deadlines_s, default=None)
        )

    def _count_left(self) -> int:
        return sum(
            [len(p.tokens) - p.num_planned for p in chain(self._waiting, self._started.values())]
        )

    def audit(self) -> list[str]:
        """Return problems of all ledgers; empty if every owner of a block is a started prompt, a
        lease, a read, a write or a copy.
        """
        problems = self.blocks.check() + self.leases.check() + self.cache.check()
        for rank in range(self.blocks.num_ranks):
            started = [
                (prompt.key, prompt.block_ids)
                for prompt in self._started.values()
                if prompt.rank == rank
            ]
            problems += self.blocks.check_owners(
                rank, [*self.leases.owners(rank), *self.cache.owners(rank), *started]
            )
        if self._num_tokens_left not in (None, self._count_left()):
            problems.append(f"the number of tokens left, {self._num_tokens_left}, is wrong")
        if any(prompt.block_ids for prompt in self._waiting):
            problems.append("a waiting prompt has blocks")
        steps = {step.step_id for step in self._in_flight}
        for prompt in self._started.values():
            if (prompt.is_dropped or not prompt.num_left) and prompt.last_step_id not in steps:
                problems.append(f"{prompt.key} is done but still held")
        return problems

    def _answer(self, reply_id: int) -> Audit:
        return Audit(
            self._identity.unit,
            reply_id,
            self.blocks.num_used,
            self.num_requests,
            tuple(self.audit()),
        )

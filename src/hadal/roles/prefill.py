"""The prefill unit's leader: turns prompts into first tokens, and holds their KV under a lease until decode has it.

    waiting --start: all its blocks--> started --last chunk planned--> (in flight) --StepDone--> leased --> gone

Prompts are served in the order they came. Two plans may be in flight, so a prompt's next chunk is planned while the one
before is computed. Knows nothing of other units; the front decides what comes here and what becomes of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from hadal.core.errors import InvariantError
from hadal.core.messages import (
    Audit,
    AuditRequest,
    FrontUp,
    Generation,
    KvLease,
    Prefill,
    PrefillDone,
    Release,
    Returned,
    Token,
)
from hadal.core.plans import Chunk, PrefillPlan, StepDone
from hadal.core.seams import MAX_STEPS_IN_FLIGHT, Effect, Event, Execute, Freed, Send, Tick
from hadal.kv.blocks import BlockAllocator, blocks_for
from hadal.kv.handover import HeldLease, LeaseBook
from hadal.policy.batching import pack_chunks
from hadal.policy.views import PromptView
from hadal.roles.ending import finish_of, history_of
from hadal.roles.reasons import LEASE_EXPIRED, QUEUE_FULL, STEP_FAILED, TOO_LONG
from hadal.roles.unit import UnitReporter

Key = tuple[str, int]


@dataclass(slots=True)
class _Prompt:
    """One attempt, from its arrival until its blocks are leased or freed."""

    generation: Generation
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...] = ()
    num_planned: int = 0
    last_step_id: int = -1
    """The last plan that writes its blocks: they cannot be freed before it is done."""
    is_dropped: bool = False
    """Nobody wants it any more; it only waits for that plan."""

    @property
    def key(self) -> Key:
        return self.generation.request_id, self.generation.attempt

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_planned


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: PrefillPlan
    prompts: tuple[_Prompt, ...]
    """Of the plan's chunks, in the same order."""


@dataclass(slots=True)
class _Out:
    """Effects of one event, in the order the host must apply them: blocks are freed before a plan writes them again."""

    effects: list[Effect] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


class PrefillLeader:
    """`pool_name` names the pool's memory for those who pull from it, and must be new at every start of the unit."""

    def __init__(
        self, unit: str, epoch: str, pool_name: str, num_blocks: int, *, chunk_tokens: int, num_requests_max: int,
        num_waiting_max: int, lease_s: float, heartbeat_s: float,
    ) -> None:  # fmt: skip
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; a step must compute at least one token.")
        self.blocks = BlockAllocator(num_blocks)
        self.leases = LeaseBook()
        self._unit = unit
        self._pool_name = pool_name
        self._chunk_tokens = chunk_tokens
        self._num_requests_max = num_requests_max
        self._num_waiting_max = num_waiting_max
        self._lease_s = lease_s
        self._waiting: dict[Key, _Prompt] = {}
        self._started: dict[Key, _Prompt] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._num_plans = 0
        self._reporter = UnitReporter(unit, "prefill", epoch, self.blocks, num_requests_max, heartbeat_s)

    def start(self, now_s: float) -> list[Effect]:
        """The first effects of the process: say that the unit is up."""
        return [self._reporter.up(), *self._beat(now_s)]

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        """Take in one event and return what to do, in order."""
        out = _Out()
        match event:
            case Prefill(generation):
                self._accept(generation, out)
            case StepDone():
                self._step_done(now_s, event, out)
            case Release(request_id, attempt):
                self._drop((request_id, attempt), out)
            case FrontUp():
                if self._reporter.is_new_front(event):
                    self._drop_everything(out)
                out.effects.append(self._reporter.up())
            case AuditRequest(reply_id):
                out.effects.append(Send("front", self._answer(reply_id)))
            case Tick():
                pass  # What is due by now is seen to below, as after any event.
            case _:
                raise InvariantError(f"{self._unit}: a prefill leader cannot take {type(event).__name__}")
        for lease in self.leases.expired(now_s):
            self.blocks.free(lease.block_ids, (lease.request_id, lease.attempt))
            out.freed += lease.block_ids
            self._give_back((lease.request_id, lease.attempt), LEASE_EXPIRED, out)
        if out.freed:
            out.effects.append(Freed(tuple(out.freed)))
        self._plan(out)
        out.effects += self._beat(now_s)
        return out.effects

    # ---- what comes in ----
    def _accept(self, generation: Generation, out: _Out) -> None:
        prompt = _Prompt(generation, generation.prompt + generation.output)
        if prompt.key in self._waiting or prompt.key in self._started or prompt.key in self.leases:
            return  # The same message twice.
        if blocks_for(len(prompt.tokens)) > self.blocks.num_usable:
            self._give_back(prompt.key, f"{TOO_LONG}: {len(prompt.tokens)} tokens", out)
        elif len(self._waiting) >= self._num_waiting_max + self._num_requests_max:
            self._give_back(prompt.key, QUEUE_FULL, out)
        else:
            self._waiting[prompt.key] = prompt

    def _drop(self, key: Key, out: _Out) -> None:
        self._waiting.pop(key, None)
        lease = self.leases.release(*key)
        if lease is not None:
            self.blocks.free(lease.block_ids, key)
            out.freed += lease.block_ids
        prompt = self._started.get(key)
        if prompt is not None:
            prompt.is_dropped = True
            self._free_if_done(prompt, out)

    def _drop_everything(self, out: _Out) -> None:
        self._waiting.clear()
        for lease in self.leases.clear():
            self.blocks.free(lease.block_ids, (lease.request_id, lease.attempt))
            out.freed += lease.block_ids
        for prompt in list(self._started.values()):
            prompt.is_dropped = True
            self._free_if_done(prompt, out)

    def _free_if_done(self, prompt: _Prompt, out: _Out) -> None:
        """Free a dropped prompt's blocks unless a plan in flight still writes them."""
        if prompt.is_dropped and not any(prompt.last_step_id == step.plan.step_id for step in self._in_flight):
            del self._started[prompt.key]
            self.blocks.free(prompt.block_ids, prompt.key)
            out.freed += prompt.block_ids

    # ---- what comes back from the Runner ----
    def _step_done(self, now_s: float, done: StepDone, out: _Out) -> None:
        if not self._in_flight or self._in_flight[0].plan.step_id != done.step_id:
            raise InvariantError(f"{self._unit}: step {done.step_id} is done, but it is not the one that runs.")
        step = self._in_flight.popleft()
        self._reporter.meter.done(done.elapsed_s)
        if done.error is not None:
            for prompt in step.prompts:
                self._give_up(prompt, done.error, out)
        else:
            expected = {i for i, chunk in enumerate(step.plan.chunks) if chunk.sampling is not None}
            if len(done.keys) != len(expected) or set(done.keys) != expected or len(done.tokens) != len(done.keys):
                raise InvariantError(f"{self._unit}: step {done.step_id} drew for chunks {done.keys}, not {expected}.")
            for key, token in zip(done.keys, done.tokens, strict=True):
                if key in done.failed:
                    self._give_up(step.prompts[key], done.failed[key], out)
                elif not step.prompts[key].is_dropped:
                    self._first_token(now_s, step.prompts[key], token, done, key, out)
        for prompt in step.prompts:
            if prompt.key in self._started:
                self._free_if_done(prompt, out)

    def _give_up(self, prompt: _Prompt, error: str, out: _Out) -> None:
        if not prompt.is_dropped:
            self._give_back(prompt.key, f"{STEP_FAILED}: {error}", out)
            prompt.is_dropped = True

    def _first_token(self, now_s: float, prompt: _Prompt, value: int, done: StepDone, key: int, out: _Out) -> None:
        generation, index = prompt.generation, len(prompt.generation.output)
        draw = done.draws.get(key)
        token = Token(
            generation.request_id, generation.attempt, index, value, finish_of(generation, index, value),
            draw.logprob if draw else None, draw.top if draw else (),
        )  # fmt: skip
        lease = None
        if token.finish is None:
            del self._started[prompt.key]
            self.leases.open(HeldLease(*prompt.key, prompt.block_ids, now_s + self._lease_s))
            lease = KvLease(
                self._pool_name, prompt.block_ids, self.blocks.generations(prompt.block_ids), len(prompt.tokens),
                self._lease_s,
            )  # fmt: skip
        else:
            prompt.is_dropped = True  # Freed by the caller: this was its last plan.
        out.effects.append(Send("front", PrefillDone(self._unit, token, lease)))

    # ---- what goes to the Runner ----
    def _plan(self, out: _Out) -> None:
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            # Every prompt takes a token at least, so more candidates than tokens are never packed.
            candidates = list(islice(self._candidates(), self._chunk_tokens))
            views = [
                PromptView(prompt.num_left, 0 if prompt.block_ids else blocks_for(len(prompt.tokens)))
                for prompt in candidates
            ]
            num_starts = self._num_requests_max - len(self._started)
            sizes = pack_chunks(views, self._chunk_tokens, self.blocks.num_free, num_starts)
            if not sizes:
                return
            chosen = candidates[: len(sizes)]
            chunks = tuple(self._chunk(prompt, size) for prompt, size in zip(chosen, sizes, strict=True))
            plan = PrefillPlan(self._num_plans, chunks)
            self._num_plans += 1
            self._in_flight.append(_InFlight(plan, tuple(chosen)))
            out.effects.append(Execute((plan,)))

    def _candidates(self) -> Iterator[_Prompt]:
        started = (prompt for prompt in self._started.values() if prompt.num_left and not prompt.is_dropped)
        return chain(started, self._waiting.values())

    def _chunk(self, prompt: _Prompt, size: int) -> Chunk:
        """Plan the next `size` tokens of a prompt; the first time, take its blocks."""
        if not prompt.block_ids:
            block_ids = self.blocks.allocate(blocks_for(len(prompt.tokens)), prompt.key)
            if block_ids is None:
                raise InvariantError(f"{self._unit}: packed a prompt whose blocks are not free.")
            prompt.block_ids = block_ids
            self._started[prompt.key] = self._waiting.pop(prompt.key)
        start, end = prompt.num_planned, prompt.num_planned + size
        prompt.num_planned = end
        prompt.last_step_id = self._num_plans
        generation = prompt.generation
        request_id, tokens = generation.request_id, prompt.tokens[start:end]
        block_ids = prompt.block_ids[: blocks_for(end)]
        if end < len(prompt.tokens):
            return Chunk(request_id, tokens, start, block_ids, None, 0)
        return Chunk(
            request_id, tokens, start, block_ids, generation.sampling, len(generation.output), *history_of(generation),
            stop_ids=generation.stop_ids, min_tokens=generation.min_tokens,
        )  # fmt: skip

    # ---- what the front hears ----
    def _give_back(self, key: Key, reason: str, out: _Out) -> None:
        out.effects.append(Send("front", Returned(self._unit, *key, reason)))

    @property
    def num_requests(self) -> int:
        """Attempts of which something is held here."""
        return len(self._waiting) + len(self._started) + len(self.leases)

    def _beat(self, now_s: float) -> list[Effect]:
        waiting = chain(self._waiting.values(), self._started.values())
        num_tokens = sum(prompt.num_left for prompt in waiting)
        return self._reporter.beat(now_s, self.num_requests, num_tokens, self.leases.next_deadline_s)

    def audit(self) -> list[str]:
        """Problems of all ledgers; empty when every owned block belongs to a started prompt or a lease."""
        held: dict[int, object] = {**self.leases.owners()}
        for prompt in self._started.values():
            held.update(dict.fromkeys(prompt.block_ids, prompt.key))
        problems = self.blocks.check() + self.leases.check()
        if held != self.blocks.owners():
            problems.append(f"blocks {sorted(held.keys() ^ self.blocks.owners().keys())} are owned but not held")
        if any(prompt.block_ids for prompt in self._waiting.values()):
            problems.append("a prompt that waits holds blocks")
        steps = {step.plan.step_id for step in self._in_flight}
        for prompt in self._started.values():
            if (prompt.is_dropped or not prompt.num_left) and prompt.last_step_id not in steps:
                problems.append(f"{prompt.key} is done but still held")
        return problems

    def _answer(self, reply_id: int) -> Audit:
        return Audit(self._unit, reply_id, self.blocks.num_used, self.num_requests, tuple(self.audit()))

"""Leader (scheduler) of a unit of many ranks: an inner leader without knowledge of processes, and
the membership of the ranks.

    leader --Execute--> RankStep to every member ... RankDone of every member --one StepDone--> leader
         --Pull, ReadBlocks, StoreBlocks--> RankDo ... RankAnswered --its outcome--> leader
         --Freed, Named----> RankDo                a new formation --------RankReset-> leader

The inner leader receives one result per step, once every member did its part. If a step failed
because a peer was lost, it receives no result; the RankReset that follows makes it plan that step
again. If a step failed for another reason, it receives the failure and returns the step's requests
to the front. The unit then forms anew too, because peers may wait in the middle of that step. Until
the first RankReset, the inner leader treats all ranks as dead and does not announce the unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Protocol

import msgspec

from hadal.core.config import DECODE, PREFILL, Deployment, units_of
from hadal.core.errors import InvariantError
from hadal.core.messages.base import FRONT
from hadal.core.messages.pools import Freed, Named, PoolEffect, Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.questions import Audit, ExpertsAnswer, ExpertsRequest, Trace
from hadal.core.messages.ranks import (
    RankAnswered,
    RankDo,
    RankDone,
    RankFormed,
    RankHeartbeat,
    RankHeld,
    RankStage,
    RankStaged,
    RankStep,
    RankUp,
)
from hadal.core.messages.units import Sighting, UnitDown, UnitReport
from hadal.core.model_config import ModelConfig
from hadal.core.plans import BlocksRead, BlocksStored, Formed, KvPulled, Staged, StepDone
from hadal.core.seams import Effect, Event, Execute, Form, RankReset, Send, Tick, WakeAt
from hadal.overlap.plan import EXPERTS
from hadal.policy.slow_hosts import SlowHost
from hadal.roles.experts.experts import ExpertBalancer
from hadal.roles.experts.gain import PREFILL_TERMS
from hadal.roles.leaders import first_placement, keeps_groups, make_leader, moves_experts
from hadal.roles.ranks.membership import UnitMembership
from hadal.roles.ranks.states import UnitPhase
from hadal.roles.ranks.steps import RanksSteps, merge
from hadal.roles.suspects import Absence
from hadal.roles.unit.report import with_ranks

CHECK_S = 0.1
"""Period of the deadline checks, seconds."""


class InnerLeader(Protocol):
    """Part of PrefillLeader and DecodeLeader that is needed here."""

    def start(self, now_s: float) -> list[Effect]: ...

    def handle(self, now_s: float, event: Event) -> list[Effect]: ...


class PoolRequests:
    """Pool operations that an inner leader requested of its ranks and that have no outcome yet.
    `members`: rank -> epoch in the formation of the inner leader's last RankReset.
    """

    def __init__(self) -> None:
        self.members: dict[int, str] = {}
        self._asked: dict[tuple[Hashable, ...], int] = {}
        """Key of an outstanding pull, disk read or disk write -> its rank."""
        self._held: list[Pull | ReadBlocks] | None = None
        """Copies and reads into pools that wait for the next formation; None: none are held. They
        are held back after a failed step: the inner leader treats that step's blocks as free, while
        other ranks may still write to them.
        """

    def ask(self, effect: Pull | ReadBlocks | StoreBlocks) -> None:
        """Note that the inner leader waits for an outcome."""
        self._asked[_key(effect)] = effect.rank

    def answered(self, message: RankAnswered) -> bool:
        """Accept an answer; False if the rank was not asked, or is lost for the inner leader."""
        key = _key(message.outcome)
        is_meant = self.members.get(message.rank) == message.epoch
        if not is_meant or self._asked.get(key) != message.rank:
            return False
        del self._asked[key]
        return True

    def hold_writes(self) -> None:
        """Hold back copies and reads into pools until the next `reset`."""
        self._held = []

    def is_held(self, effect: PoolEffect) -> bool:
        """Return whether an effect is held back; if it is, `reset` returns it."""
        if self._held is None or not isinstance(effect, Pull | ReadBlocks):
            return False
        self._held.append(effect)
        return True

    def reset(
        self, members: dict[int, str]
    ) -> tuple[tuple[int, ...], tuple[int, ...], list[Pull | ReadBlocks]]:
        """Replace the members by those of a new formation. Returns the lost ranks, the fresh ranks,
        and the effects held back for ranks that were not lost.
        """
        before, self.members = self.members, members
        lost = tuple(rank for rank in before if members.get(rank) != before[rank])
        fresh = tuple(rank for rank in members if before.get(rank) != members[rank])
        self._asked = {key: rank for key, rank in self._asked.items() if rank not in lost}
        held, self._held = self._held or (), None
        return lost, fresh, [effect for effect in held if effect.rank not in lost]


class RankedLeader:
    """Leader of a unit with one process per rank. `num_slots`: slots of one rank in a decode unit;
    0 in a prefill unit, which numbers chunks instead.

    `step_timeout_s`: a step is aborted if no rank's compute thread moves for this time, which must
    exceed the deadline of an exchange. `growing_s` returns the part of one MoE layer's expert time
    in a step that grows with tokens, seconds. At 0 moving experts gains nothing, so they stay.
    """

    def __init__(
        self,
        unit: str,
        inner: InnerLeader,
        membership: UnitMembership,
        *,
        num_slots: int = 0,
        step_timeout_s: float = 15.0,
        experts: ExpertBalancer | None = None,
        growing_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.inner = inner
        self.membership = membership
        self.experts = experts or ExpertBalancer(
            membership.placement, (0,) * membership.num_ranks, is_planning=False
        )
        self._growing_s = growing_s
        self.num_stale = 0
        """Number of dropped messages of older formations and processes."""
        self._unit = unit
        self._steps = RanksSteps(num_slots, step_timeout_s)
        self._requests = PoolRequests()
        self._formation = 0
        """Formation of the steps in flight."""
        self._was_running = False
        self._leader_wake_s = math.inf
        self._wake_s = math.inf
        self._check_s = -math.inf
        self._absence = Absence(CHECK_S)
        self._out: list[Effect] = []

    def take_notes(self) -> list[str]:
        """Return sentences for the log about events of the unit since the last call."""
        notes = [*self.membership.notes, *self.experts.notes]
        self.membership.notes.clear()
        self.experts.notes.clear()
        return notes

    def start(self, now_s: float) -> list[Effect]:
        """Return the first effects of the process. The inner leader announces the unit only once
        the first formation runs.
        """
        self._out.clear()
        self._absence.called(now_s)
        self._apply(now_s, self.inner.start(now_s))
        self._tick(now_s)
        self._wake(now_s)
        return [*self._out]

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        """Process one event, and return the effects in order."""
        self._out.clear()
        if missed_s := self._absence.called(now_s):
            self.membership.forgive(missed_s)
            self.experts.forgive(missed_s)
        match event:
            case RankUp():
                self.membership.rank_up(now_s, event)
            case RankHeld():
                self.membership.rank_held(now_s, event)
            case RankHeartbeat():
                self.membership.heartbeat(now_s, event)
            case RankFormed():
                self.membership.formed(now_s, event)
            case UnitDown():
                self.membership.unit_down(now_s, event)
            case Sighting():
                self.membership.sighted(now_s, event)
            case RankDone():
                self._rank_done(now_s, event)
            case RankAnswered():
                self._rank_answered(now_s, event)
            case RankStaged():
                self._rank_staged(now_s, event)
            case ExpertsRequest(reply_id):
                body = msgspec.json.encode(self.experts.described())
                self._out.append(Send(FRONT, ExpertsAnswer(self._unit, reply_id, body)))
            case Tick():
                self._tick(now_s)
            case (
                StepDone()
                | Formed()
                | Staged()
                | KvPulled()
                | BlocksRead()
                | BlocksStored()
                | RankReset()
            ):
                raise InvariantError(
                    f"{self._unit}: {type(event).__name__} is not for a leader without a rank."
                )
            case _:
                self._feed(now_s, event)
        self._follow_membership(now_s)
        self._wake(now_s)
        return [*self._out]

    # ---- the inner leader ----
    def _feed(self, now_s: float, event: Event) -> None:
        self._apply(now_s, self.inner.handle(now_s, event))

    def _apply(self, now_s: float, effects: list[Effect]) -> None:
        """Turn those effects of the inner leader that concern ranks into messages to ranks."""
        for effect in effects:
            match effect:
                case Execute():
                    self._execute(now_s, effect)
                case Pull() | ReadBlocks() | StoreBlocks():
                    self._requests.ask(effect)
                    self._tell(effect)
                case Freed() | Named():
                    self._tell(effect)
                case WakeAt(time_s):
                    self._leader_wake_s = time_s
                case Send(to, Audit() as audit):
                    problems = (*audit.problems, *self.check())
                    self._out.append(Send(to, msgspec.structs.replace(audit, problems=problems)))
                case Send(to, UnitReport() as report):
                    ranks, living = self.membership.num_ranks, self.membership.living
                    report = with_ranks(report, ranks, living, self.experts.figures())
                    self._out.append(Send(to, report))
                case Send(to, Trace() as trace):
                    trace = self._steps.clocks.aligned(now_s, self.experts.traced(trace))
                    self._out.append(Send(to, trace))
                case Form():
                    raise InvariantError(f"{self._unit}: an inner leader does not form.")
                case _:
                    self._out.append(effect)

    def _tell(self, effect: PoolEffect) -> None:
        """Send an effect to the process that the inner leader addresses. If it is gone, drop the
        effect: the next RankReset reports the loss.
        """
        epoch = self._requests.members.get(effect.rank)
        if epoch is None or not self.membership.is_member(effect.rank, epoch):
            return
        if not self._requests.is_held(effect):
            self._send_rank(effect.rank, RankDo(effect))

    def _send_rank(self, rank: int, message: RankDo | RankStep | RankStage) -> None:
        self._out.append(Send(f"{self._unit}.{rank}", message))

    # ---- steps ----
    def _execute(self, now_s: float, effect: Execute) -> None:
        if (
            self.membership.phase is not UnitPhase.RUNNING
            or self.membership.formation != self._formation
        ):
            return  # No step may begin, and the next formation voids these plans.
        plans = self.experts.planned(effect.plans[0].step_id, effect.plans)
        self._steps.begin(now_s, plans)
        for rank in self.membership.members:
            self._send_rank(rank, RankStep(self._formation, plans[rank]))

    def _rank_done(self, now_s: float, message: RankDone) -> None:
        is_current = message.formation == self.membership.formation and self.membership.is_running
        is_member = self.membership.is_member(message.rank, message.epoch)
        up = self.membership.up_of(message.rank) if is_member else None
        host = up.host if up is not None else None
        if not is_current or not is_member or not self._steps.add(now_s, message, host):
            self.num_stale += 1
            return
        if message.done.error is not None:
            self.membership.broke(now_s, message.rank, message.lost)
        slow = self._deliver(now_s)
        if slow is not None:
            self.membership.rest(now_s, slow)

    def _deliver(self, now_s: float) -> SlowHost | None:
        """Pass complete steps to the inner leader in order. A step that failed by a rank's own
        fault is passed as failed and ends the formation. Returns a host that slows the steps, or
        None.
        """
        slow = None
        while (
            (step := self._steps.oldest) is not None
            and self.membership.is_running
            and self.membership.formation == self._formation
        ):
            if error := step.error:
                self._steps.drop()
                self.membership.notes.append(f"step {step.step_id} failed: {error}")
                self.membership.form(now_s)
                self._requests.hold_writes()
                elapsed_s = max(part.elapsed_s for part in step.parts.values())
                self._feed(now_s, StepDone(step.step_id, (), (), {}, elapsed_s, error))
                return None
            if not step.is_done(self.membership.members):
                return slow
            slow = self._steps.done(now_s, self.membership.hosts) or slow
            if self.experts.done(step.step_id, step.parts):
                self.membership.adopt(self.experts.placement)
            self._feed(now_s, merge(step.step_id, step.offsets, step.parts))
        return slow

    def _rank_answered(self, now_s: float, message: RankAnswered) -> None:
        """Pass a rank's outcome to the inner leader, unless it no longer waits for the outcome."""
        if not self._requests.answered(message):
            self.num_stale += 1
            return
        self._feed(now_s, message.outcome)

    # ---- experts ----
    def _rank_staged(self, now_s: float, message: RankStaged) -> None:
        is_member = self.membership.is_member(message.rank, message.epoch)
        if not is_member or not self.experts.staged(now_s, message.rank, message.staged):
            self.num_stale += 1

    def _may_plan_experts(self, now_s: float) -> bool:
        return self.membership.phase is UnitPhase.RUNNING and self.experts.may_plan(now_s)

    def _plan_experts(self, now_s: float) -> None:
        """Plan experts in a Tick of their own, after the messages that steps wait for are sent."""
        if self._may_plan_experts(now_s):
            for rank, plan in self.experts.plan(now_s, self._growing_s()).items():
                self._send_rank(rank, RankStage(plan))

    # ---- formations ----
    def _follow_membership(self, now_s: float) -> None:
        """Apply the membership's decisions: drop the steps of an older formation, and inform the
        inner leader of a new one.
        """
        membership = self.membership
        if membership.phase is UnitPhase.DRAINING and self._steps.oldest is None:
            membership.form(now_s)
        if membership.formation != self._formation:
            self._formation = membership.formation
            self._steps.reset(membership.hosts())
            self._was_running = False
            self.experts.ended()
        self._out += membership.take_sends()
        if membership.is_running and not self._was_running:
            self._was_running = True
            ups = {
                rank: up
                for rank in membership.members
                if (up := membership.up_of(rank)) is not None
            }
            addresses = {rank: (up.host, up.expert_port) for rank, up in ups.items()}
            self.experts.began(membership.formation, membership.placement, addresses)
            self._reset_leader(now_s)
        elif membership.phase is UnitPhase.WAITING and self._requests.members:
            self._reset_leader(
                now_s
            )  # No rank is left: release all blocks now, before any replacement comes.

    def _reset_leader(self, now_s: float) -> None:
        now = dict(self.membership.members)
        lost, fresh, held = self._requests.reset(now)
        for effect in held:
            self._send_rank(effect.rank, RankDo(effect))
        pools = tuple(
            self.membership.pool_of(rank) if rank in now else ""
            for rank in range(self.membership.num_ranks)
        )
        taken = {
            rank: found for rank in fresh if (found := self.membership.take_held(rank)) is not None
        }
        self._feed(
            now_s, RankReset(lost, fresh, pools=pools, formation=self._formation, held=taken)
        )

    # ---- time ----
    def _tick(self, now_s: float) -> None:
        if now_s >= self._check_s:
            self._check_s = now_s + CHECK_S
            self.membership.tick(now_s, self._steps.oldest is not None)
            self.experts.tick(now_s)
            step, timeout_s = self._steps.oldest, self._steps.timeout_s
            if step is not None and self.membership.is_idle_since(step.sent_s, now_s - timeout_s):
                self.membership.notes.append(
                    f"step {step.step_id} is aborted: no rank made progress for {timeout_s:g} s"
                )
                self.membership.form(now_s)
        if now_s >= self._leader_wake_s:
            self._leader_wake_s = math.inf
            self._feed(now_s, Tick())
        self._plan_experts(now_s)

    def _wake(self, now_s: float) -> None:
        wake_s = min(
            self._check_s, self._leader_wake_s, now_s if self._may_plan_experts(now_s) else math.inf
        )
        if self._wake_s <= now_s or wake_s < self._wake_s:
            self._wake_s = wake_s
            self._out.append(WakeAt(wake_s))

    def check(self) -> list[str]:
        """Return problems of the membership and of the steps in flight; empty when they agree."""
        problems = [*self.membership.check(), *self.experts.check()]
        if self._was_running and self.experts.placement is not self.membership.placement:
            problems.append(
                "the placement that the ranks have is not the one that the unit would form with"
            )
        outsiders = self._steps.ranks - self.membership.members.keys()
        if outsiders and self.membership.formation == self._formation:
            problems.append(f"ranks {sorted(outsiders)} did steps of a formation they are not in")
        if len(self._steps) and not self.membership.is_running:
            problems.append(
                f"{len(self._steps)} steps are in flight while the unit is {self.membership.phase}"
            )
        return problems


def make_ranked_leader(
    deployment: Deployment,
    config: ModelConfig,
    unit: str,
    role: str,
    epoch: str,
    *,
    fingerprint: str = "",
) -> RankedLeader:
    """Return the leader of a unit with one process per rank. Its inner leader is made like that of
    a unit of one process (roles/leaders).
    """
    units = units_of(deployment, role)
    inner = make_leader(deployment, config, unit, role, epoch, fingerprint=fingerprint)
    placement = first_placement(deployment, config, role)
    experts = ExpertBalancer(
        placement,
        units.nodes,
        is_planning=moves_experts(units),
        num_groups=config.n_group if keeps_groups(units, config, role) else 0,
        terms=PREFILL_TERMS if role == PREFILL else None,
    )
    costs = inner.scheduler.costs
    return RankedLeader(
        unit,
        inner,
        UnitMembership(
            unit,
            units.ranks,
            placement,
            rank_timeout_s=deployment.rank_timeout_s,
            slow_host_rest_s=deployment.slow_host_rest_s,
        ),
        num_slots=units.max_requests if role == DECODE else 0,
        step_timeout_s=deployment.collective_timeout_s + deployment.rank_timeout_s,
        experts=experts,
        growing_s=lambda: costs.growing_s(EXPERTS),
    )


def _key(
    entry: Pull | ReadBlocks | StoreBlocks | KvPulled | BlocksRead | BlocksStored,
) -> tuple[Hashable, ...]:
    """Return a key that a request to a rank and its outcome have in common."""
    match entry:
        case Pull(request_id, attempt) | KvPulled(request_id, attempt):
            return KvPulled, request_id, attempt
        case ReadBlocks(read_id) | BlocksRead(read_id):
            return BlocksRead, read_id
        case StoreBlocks(store_id) | BlocksStored(store_id):
            return BlocksStored, store_id

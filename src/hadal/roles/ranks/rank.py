"""Role of a rank's process: it executes its leader's (scheduler's) orders for the present
formation, and sends heartbeats.

    RankUp ... RankUp --RankForm--> Form ... Formed --RankFormed--> RankStep -> Execute -> StepDone -> RankDone
                                                                    RankStage -> Stage -> Staged -> RankStaged

Decides nothing: the leader owns slots, blocks and plans. Late steps and stages of an older
formation are dropped, and so are results of its aborted steps. Pulls, freed blocks, and disk reads
and writes belong to no formation, because KV outlives formations. They are accepted from the first
FormPlan on; earlier ones were meant for this rank's previous process.

A rank outlives its leader. It records its pool's contents from the plans it receives
(roles/ranks/holdings). A new leader has not registered the rank, so it answers a heartbeat with
RankWho. The rank sends RankHeld as soon as no copy, read or write of its pool is under way.

The wire between a leader and a rank keeps the order and never duplicates. It loses messages only
when one of the two processes ends.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from hadal.core.config import RANK_HEARTBEAT_S
from hadal.core.errors import InvariantError
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.pools import Freed, Named, PoolEffect, Pull, ReadBlocks
from hadal.core.messages.ranks import (
    RankAnswered,
    RankDo,
    RankDone,
    RankForm,
    RankFormed,
    RankHeartbeat,
    RankHeld,
    RankStage,
    RankStaged,
    RankStep,
    RankUp,
    RankWho,
)
from hadal.core.plans import (
    BlocksRead,
    BlocksStored,
    Formed,
    FormPlan,
    KvPulled,
    Staged,
    StagePlan,
    StepDone,
)
from hadal.core.seams import (
    MAX_STEPS_IN_FLIGHT,
    Effect,
    Event,
    Execute,
    Form,
    Send,
    Stage,
    Tick,
    WakeAt,
)
from hadal.roles.ranks.holdings import RankHoldings


class RankProgress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Progress of the rank's compute thread. The host passes it on before every Tick and every
    result of a step, and whenever `lost` changed.
    """

    num_ops: int
    """Ops begun since the process started."""
    is_computing: bool
    """True if a step runs and does not wait for a peer, so that `num_ops` must grow."""
    lost: tuple[int, ...] = ()
    """Members of the present formation with a broken connection."""


class RankRole:
    """State machine of the rank that `up` describes. Its leader has the unit's name on the wire."""

    def __init__(self, up: RankUp) -> None:
        self.formation = 0
        """Number of the newest FormPlan accepted; 0: none yet."""
        self.num_stale = 0
        """Number of dropped messages and results, mostly of older formations."""
        self._up = up
        self._is_formed = False
        self._progress = RankProgress(0, False)
        self._in_flight: deque[tuple[int, int, float]] = deque()
        """(formation, step id, time of receipt) of steps that the host has not finished."""
        self._holdings = RankHoldings()
        self._num_asked = 0
        """Copies, reads and writes of the pool that the host has not finished."""
        self._must_identify = False
        """True while a new leader waits for RankHeld, which is sent once `_num_asked` is 0."""
        self._next_heartbeat_s = -math.inf
        self._wake_s = -math.inf
        self._out: list[Effect] = []

    def start(self, now_s: float) -> list[Effect]:
        """Return the first effects: report to the leader and the supervisor that it is ready."""
        self._next_heartbeat_s = now_s + RANK_HEARTBEAT_S
        self._out[:] = [Send(SUPERVISOR, self._up), Send(self._up.unit, self._up)]
        self._wake()
        return [*self._out]

    def handle(self, now_s: float, event: Event | RankProgress) -> list[Effect]:
        """Process one event, and return the effects in order."""
        self._out.clear()
        match event:
            case RankForm(plan):
                self._form(plan)
            case RankStep():
                self._step(now_s, event)
            case RankStage(plan):
                self._stage(plan)
            case RankDo(effect):
                self._do(effect)
            case RankWho(epoch):
                self._must_identify = self._must_identify or epoch == self._up.epoch
            case StepDone():
                self._step_done(now_s, event)
            case Formed():
                self._formed(event)
            case Staged():
                self._staged(event)
            case KvPulled() | BlocksRead() | BlocksStored():
                self._num_asked -= 1
                self._out.append(
                    Send(self._up.unit, RankAnswered(self._up.rank, self._up.epoch, event))
                )
            case RankProgress():
                if not self._is_formed:  # Losses of an older formation say nothing about this one.
                    event = msgspec.structs.replace(event, lost=())
                if set(event.lost) - set(self._progress.lost):
                    self._next_heartbeat_s = now_s  # Send it at once: the leader waits for it.
                self._progress = event
            case Tick():
                pass  # The heartbeat is sent below.
            case _:
                raise InvariantError(f"{self._name}: a rank cannot handle {type(event).__name__}")
        if self._must_identify and not self._num_asked:
            self._must_identify = False
            self._out.append(Send(self._up.unit, self._held()))
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + RANK_HEARTBEAT_S
            self._out.append(Send(self._up.unit, self._heartbeat()))
        if self._wake_s <= now_s or self._next_heartbeat_s < self._wake_s:
            self._wake()
        return [*self._out]

    # ---- orders of the leader ----
    def _form(self, plan: FormPlan) -> None:
        epochs = {member.rank: member.epoch for member in plan.members}
        if plan.formation <= self.formation or epochs.get(self._up.rank) != self._up.epoch:
            self.num_stale += 1  # Repeated, or meant for this rank's previous process.
            return
        self.formation = plan.formation
        self._holdings.form(plan)
        self._is_formed = False
        self._progress = msgspec.structs.replace(self._progress, lost=())
        self._out.append(Form(plan))

    def _step(self, now_s: float, message: RankStep) -> None:
        if message.formation != self.formation or not self._is_formed:
            self.num_stale += 1
            return
        num_in_flight = sum(formation == self.formation for formation, *_ in self._in_flight)
        if num_in_flight >= MAX_STEPS_IN_FLIGHT:
            raise InvariantError(
                f"{self._name}: step {message.plan.step_id} is one too many in flight."
            )
        self._in_flight.append((message.formation, message.plan.step_id, now_s))
        self._holdings.step(message.plan)
        self._out.append(Execute((message.plan,)))

    def _stage(self, plan: StagePlan) -> None:
        if plan.formation != self.formation or not self._is_formed:
            self.num_stale += 1
            return
        self._out.append(Stage(plan))

    def _do(self, effect: PoolEffect) -> None:
        """Note an operation on the pool, and pass it to the host."""
        if not self.formation:
            self.num_stale += 1  # Meant for this rank's previous process.
            return
        match effect:
            case Named():
                self._holdings.name(effect.named, are_all=effect.are_all)
                return  # Only recorded here; the host does not need it.
            case Freed(block_ids):
                self._holdings.freed(block_ids)
            case ReadBlocks() | Pull():
                self._holdings.loaded(effect.into)
                self._num_asked += 1
            case _:
                self._num_asked += 1
        self._out.append(effect)

    # ---- results of the host ----
    def _step_done(self, now_s: float, done: StepDone) -> None:
        if not self._in_flight or self._in_flight[0][1] != done.step_id:
            raise InvariantError(
                f"{self._name}: step {done.step_id} is done, but it is not the one that runs."
            )
        formation, _, taken_s = self._in_flight.popleft()
        self._holdings.stepped(has_run=done.error is None)
        if formation != self.formation:
            self.num_stale += 1
            return
        lost = self._progress.lost if done.error is not None else ()
        answer = RankDone(self._up.rank, self._up.epoch, formation, done, lost, taken_s, now_s)
        self._out.append(Send(self._up.unit, answer))

    def _formed(self, formed: Formed) -> None:
        if formed.formation != self.formation:
            self.num_stale += 1
            return
        self._is_formed = formed.error is None
        self._out.append(Send(self._up.unit, RankFormed(self._up.rank, self._up.epoch, formed)))

    def _staged(self, staged: Staged) -> None:
        if staged.formation != self.formation:
            self.num_stale += 1
            return
        self._out.append(Send(self._up.unit, RankStaged(self._up.rank, self._up.epoch, staged)))

    # ---- signs of life ----
    def _heartbeat(self) -> RankUp | RankHeartbeat:
        if not self.formation:
            return self._up
        progress = self._progress
        return RankHeartbeat(
            self._up.rank,
            self._up.epoch,
            self.formation,
            progress.num_ops,
            progress.is_computing,
            progress.lost,
        )

    def _held(self) -> RankUp | RankHeld:
        """Return the rank's identity and pool contents, for a leader that took it over."""
        plan = self._holdings.plan
        return self._up if plan is None else RankHeld(self._up, plan, self._holdings.held())

    @property
    def _name(self) -> str:
        return f"{self._up.unit}.{self._up.rank}"

    def _wake(self) -> None:
        self._wake_s = self._next_heartbeat_s
        self._out.append(WakeAt(self._wake_s))

    def audit(self) -> list[str]:
        """Return problems; empty when at most MAX_STEPS_IN_FLIGHT steps are in flight."""
        num_in_flight = sum(formation == self.formation for formation, *_ in self._in_flight)
        return (
            [f"{num_in_flight} plans are in flight"] if num_in_flight > MAX_STEPS_IN_FLIGHT else []
        )

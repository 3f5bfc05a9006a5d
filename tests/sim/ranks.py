"""Ranks without a network: compute threads that meet in every step, and their processes.

A step or formation ends on a rank after all members have reached it. A dead member fails it on all
others, a stopped member keeps them waiting, and a FormPlan aborts it. Whether a rank has
written the KV of a failed step is drawn for each rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np

from hadal.comm.host_waits import HostWaits
from hadal.core.messages.every import AnyMessage
from hadal.core.plans import Formed, FormPlan, Staged, StagePlan, StepDone, StepPlan
from hadal.core.seams import Effect, Event, Execute, Form, Stage, Tick
from hadal.lab.sim.world.clock import SimClock
from hadal.roles.ranks.rank import RankProgress, RankRole
from tests.sim.engine import DecodeEngine, PrefillEngine
from tests.sim.experts import SimExperts, Traffic, skewed
from tests.sim.host import Host

STAGE_S = 0.05
"""Longest time to stage a replica, seconds."""
COLLECTIVE_TIMEOUT_S = 10.0
NOTICE_S = 0.05
"""Longest time until a broken connection is noticed, seconds."""
ABORT_S = 0.05
"""Longest time that a step runs on after it is told to abort, seconds."""
Ident = tuple[int, str]
"""A rank's process: (rank, epoch)."""
Key = tuple[frozenset[Ident], int, int | None]
"""Meeting point of compute threads: members, formation, and a step's id (None: forming)."""


class Fabric:
    """Connections between the processes of one unit, dead and living."""

    def __init__(self, clock: SimClock, random: Random) -> None:
        self.clock = clock
        self.random = random
        self.living: dict[Ident, SimCompute] = {}
        seed = random.randrange(2**32)
        self.traffic = Traffic(skewed(seed), np.random.default_rng(seed))
        self.stage_fault_rate = 0.0
        self.stage_s = STAGE_S
        self.link_s: dict[int, float] = {}
        """Rank -> mean delay of a message to it or from it, seconds; other ranks have none."""
        self._arrived: dict[Key, dict[int, SimCompute]] = {}

    def arrive(self, compute: SimCompute, key: Key) -> None:
        """Let a compute thread wait for its peers; complete the step once all have arrived."""
        arrived = self._arrived.setdefault(key, {})
        arrived[compute.rank] = compute
        for ident in compute.members.items():
            if ident not in self.living:
                self.break_link(compute, ident[0])
        if arrived.keys() >= compute.members.keys():
            del self._arrived[key]
            if key[2] is not None:
                self._exchange(list(arrived.values()))
            for each in arrived.values():
                each.complete_soon(key, self._wait(each, list(arrived.values())))

    def _wait(self, compute: SimCompute, computes: list[SimCompute]) -> float:
        """Return how long a rank still waits for its peers and their messages; record the waits."""
        now_s = self.clock.now()
        peer_to_arrived_s = {
            peer.rank: peer.arrived_s + self._on_link(peer.rank) + self._on_link(compute.rank)
            for peer in computes
            if peer is not compute
        }
        end_s = max([now_s, *peer_to_arrived_s.values()])
        compute.waits.add(compute.arrived_s, end_s, peer_to_arrived_s)
        return end_s - now_s

    def _on_link(self, rank: int) -> float:
        mean_s = self.link_s.get(rank, 0.0)
        return mean_s * self.random.uniform(0.7, 1.3) if mean_s else 0.0

    def _exchange(self, computes: list[SimCompute]) -> None:
        """Exchange a step's tokens between all ranks."""
        experts = [compute.experts for compute in computes]
        # Ranks that meet in a step have equal tables.
        assert len({each.digest() for each in experts}) == 1
        placement = experts[0].placement
        assert placement is not None
        dealt = self.traffic.deal(placement, len(experts))
        for each in experts:
            each.received(dealt)

    def holder(self, rank: int) -> SimExperts | None:
        """Return the experts of the living process with this rank, or None."""
        return next(
            (compute.experts for ident, compute in self.living.items() if ident[0] == rank), None
        )

    def absent(self, compute: SimCompute, key: Key) -> tuple[int, ...]:
        """Return the members that have not arrived."""
        return tuple(sorted(compute.members.keys() - self._arrived.get(key, {}).keys()))

    def leave(self, compute: SimCompute, key: Key) -> None:
        """Remove a compute thread that aborted its step. Peers that wait for it continue to wait."""
        arrived = self._arrived.get(key)
        if arrived is not None and arrived.pop(compute.rank, None) is not None and not arrived:
            del self._arrived[key]

    def break_link(self, compute: SimCompute, peer: int) -> None:
        """Make `compute` notice, after a delay, that its connection to `peer` is gone."""
        formation = compute.formed_generation
        delay_s = self.random.uniform(0, NOTICE_S)
        self.clock.after(delay_s, lambda: compute.peer_lost(peer, formation))

    def died(self, ident: Ident) -> None:
        """Record the end of a process: the kernel closes its connections."""
        self.living.pop(ident, None)
        for compute in self.living.values():
            if compute.members.get(ident[0]) == ident[1]:
                self.break_link(compute, ident[0])

    def cut(self) -> None:
        """Cut the connection between two living ranks."""
        if len(self.living) >= 2:
            one, other = self.random.sample(sorted(self.living), 2)
            self.break_link(self.living[one], other[0])
            self.break_link(self.living[other], one[0])


class SimCompute:
    """A rank's compute thread and its Runner: one plan at a time; a FormPlan voids older ones."""

    def __init__(
        self,
        fabric: Fabric,
        rank: int,
        epoch: str,
        engine: PrefillEngine | DecodeEngine,
        finish: Callable[[StepDone | Formed], None],
        tell: Callable[[], None],
        step_s: float,
        fault_rate: float,
    ) -> None:
        self.rank = rank
        self.members: dict[int, str] = {}
        self.formed_generation = 0
        """Formation of the newest FormPlan that began."""
        self.num_ops = 0
        self.is_computing = False
        self.is_hung = False
        """True if the thread's next op never ends."""
        self.is_stopped = False
        self.lost: tuple[int, ...] = ()
        self.experts = SimExperts(rank)
        self.waits = HostWaits()
        self.arrived_s = 0.0
        """Time at which the thread last reached a meeting point."""
        self._fabric = fabric
        self._clock = fabric.clock
        self._random = fabric.random
        self._engine = engine
        self._finish = finish
        self._tell = tell
        self._step_s = step_s
        self._fault_rate = fault_rate
        self._generation = 0
        self._queue: deque[tuple[int, StepPlan | FormPlan]] = deque()
        self._running: StepPlan | FormPlan | None = None
        self._is_completing = False
        self._is_broken = False
        fabric.living[rank, epoch] = self

    def submit(self, plan: StepPlan) -> None:
        self._queue.append((self._generation, plan))
        self._next()

    def form(self, plan: FormPlan) -> None:
        self._generation = plan.formation
        self._queue.append((plan.formation, plan))
        running = self._running
        if running is not None:
            self._clock.after(self._random.uniform(0.0, ABORT_S), lambda: self._break_off(running))
        self._next()

    def _break_off(self, plan: StepPlan | FormPlan) -> None:
        if self._running is not plan or self.is_stopped:
            return
        if not isinstance(plan, FormPlan) and self._random.random() < 0.5:  # The step wrote its KV.
            self._engine.execute(plan, self._step_s, None)  # type: ignore[arg-type]
        self._fail("PeerLost: aborted")

    def _next(self) -> None:
        if self._running is not None or not self._queue or self.is_stopped:
            return
        formation, plan = self._queue.popleft()
        self._running, self._is_completing, self.is_computing = plan, False, True
        if formation < self._generation:
            self._fail(f"formation {formation} is over")
            return
        if isinstance(plan, FormPlan):
            self._begin(plan)
        elif self._is_broken:
            self._fail("Aborted: this generation is over")
            return
        else:
            for flip in plan.flips:
                self.experts.flip(flip)
        self.num_ops += 1
        if not self.is_hung:
            self._clock.after(
                self._step_s * self._random.uniform(0.3, 1.0), lambda: self._own_part_done(plan)
            )

    def _begin(self, plan: FormPlan) -> None:
        self.experts.form(plan)
        placement = self.experts.placement
        assert placement is not None
        self.members = {member.rank: member.epoch for member in plan.members}
        self.waits.form(self.rank, plan.members)
        for rank in set(range(plan.num_ranks)) - self.members.keys():
            assert (placement.slot_to_expert_LRS[:, rank] < 0).all(), (
                f"rank {rank} is gone and holds experts"
            )
        self.formed_generation = plan.formation
        self.lost, self._is_broken = (), False
        if isinstance(self._engine, DecodeEngine):
            self._engine.empty()

    def _own_part_done(self, plan: StepPlan | FormPlan) -> None:
        if self._running is not plan or self.is_stopped:
            return
        self.num_ops += 1
        if not isinstance(plan, FormPlan) and self._random.random() < self._fault_rate:
            self._fail("RuntimeError: an op failed")
            return
        self.is_computing = False
        self.arrived_s = self._clock.now()
        self._clock.after(COLLECTIVE_TIMEOUT_S, lambda: self._time_out(plan))
        self._fabric.arrive(self, self._key(plan))

    def _key(self, plan: StepPlan | FormPlan) -> Key:
        step_id = None if isinstance(plan, FormPlan) else plan.step_id
        return frozenset(self.members.items()), self.formed_generation, step_id

    def complete_soon(self, key: Key, wait_s: float) -> None:
        """Complete the plan after `wait_s`, when the messages of all members have arrived."""
        plan = self._running
        assert plan is not None
        assert self._key(plan) == key, "it came to a step that it does not run"
        self._is_completing = True
        left_s = wait_s + self._step_s * self._random.uniform(0, 0.5)
        self._clock.after(left_s, lambda: self._complete(plan))

    def _complete(self, plan: StepPlan | FormPlan) -> None:
        if self._running is not plan or self.is_stopped:
            return
        self.num_ops += 1
        if isinstance(plan, FormPlan):
            self._end(Formed(plan.formation, None))
        else:
            done = self._engine.execute(plan, self._step_s, None)  # type: ignore[arg-type]
            counts = self.experts.counted(plan, done)
            self._end(
                msgspec.structs.replace(done, expert_slot_counts=counts, waited=self.waits.take())
            )

    def stage(self, plan: StagePlan, answer: Callable[[Staged], None]) -> None:
        """Stage experts in the background, beside the steps."""
        took_s = sum(self._random.uniform(0.1, 1.0) * self._fabric.stage_s for _ in plan.sources)
        self._clock.after(took_s, lambda: self._staged(plan, took_s, answer))

    def _staged(self, plan: StagePlan, took_s: float, answer: Callable[[Staged], None]) -> None:
        if (
            self.is_stopped
            or plan.formation != self.formed_generation
            or plan.formation != self._generation
        ):
            # Like the rank's role, the background thread drops plans of older formations.
            return
        if self._random.random() < self._fabric.stage_fault_rate:
            answer(
                Staged(plan.formation, plan.stage_id, plan.layer, "CheckpointError: no such tensor")
            )
            return
        num_received, num_read = self.experts.stage(plan, self._fabric.holder)
        answer(
            Staged(plan.formation, plan.stage_id, plan.layer, None, num_received, num_read, took_s)
        )

    def _time_out(self, plan: StepPlan | FormPlan) -> None:
        if self._running is plan and not self._is_completing and not self.is_stopped:
            self.lost = self._fabric.absent(self, self._key(plan))
            self._fail("PeerLost: nobody answers")

    def peer_lost(self, peer: int, formation: int) -> None:
        """Handle the loss of the connection to a peer."""
        if formation != self.formed_generation or self.is_stopped or peer in self.lost:
            return
        self.lost = (*self.lost, peer)
        self._is_broken = True
        self._tell()
        if self._running is not None and not self._is_completing and self._generation == formation:
            self._fail(f"PeerLost: rank {peer}: closed")

    def _fail(self, error: str) -> None:
        plan = self._running
        assert plan is not None
        self._fabric.leave(self, self._key(plan))
        self._is_broken = self._is_broken or not isinstance(plan, FormPlan)
        if isinstance(plan, FormPlan):
            self._end(Formed(plan.formation, error, self.lost))
            return
        if (
            self._random.random() < 0.3
            and self.formed_generation == self._generation
            and "over" not in error
        ):
            self._engine.execute(plan, self._step_s, None)  # type: ignore[arg-type]
        self._end(StepDone(plan.step_id, (), (), {}, self._step_s, error))

    def _end(self, result: StepDone | Formed) -> None:
        self._running, self.is_computing = None, False
        self._finish(result)
        self._next()


class RankHost(Host):
    """One run of a rank's process, from start to end."""

    def __init__(
        self,
        name: str,
        role: RankRole,
        clock: SimClock,
        random: Random,
        send: Callable[[str, AnyMessage], None],
        fabric: Fabric,
        engine: PrefillEngine | DecodeEngine,
        *,
        epoch: str,
        step_s: float,
        fault_rate: float,
        **options: Any,
    ) -> None:
        super().__init__(
            name, role, role.audit, clock, random, send, fault_rate=fault_rate, **options
        )
        self.fabric = fabric
        self.ident = (int(name.rpartition(".")[2]), epoch)
        self.compute = SimCompute(
            fabric,
            *self.ident,
            engine,
            lambda result: self._computed(result),
            lambda: self._progress(),
            step_s,
            fault_rate,
        )

    def handle(self, event: Event | Any) -> None:
        if isinstance(event, Tick):
            self._progress()
        super().handle(event)

    def _computed(self, result: StepDone | Formed) -> None:
        self._progress()
        super().handle(result)

    def _progress(self) -> None:
        compute = self.compute
        super().handle(RankProgress(compute.num_ops, compute.is_computing, compute.lost))  # type: ignore[arg-type]

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Execute((plan,)):
                    self.compute.submit(plan)
                case Form(plan):
                    self.compute.form(plan)
                case Stage(plan):
                    self.compute.stage(plan, lambda staged: self.handle(staged))
                case _:
                    super()._apply([effect])

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.is_stuck = True
        self.compute.is_stopped = True

    def end(self) -> None:
        """End the process."""
        self.is_alive = False
        self.compute.is_stopped = True
        self.fabric.died(self.ident)

"""Random worlds for the membership alone: ranks die, stop, hang and lose each other in steps.

In the end every unit is whole. Each step is void, or reported once and in order. Deaths are noticed in time.
"""

from __future__ import annotations

import statistics
from random import Random

import pytest

from hadal.core.config import UnitsConfig, units_of
from hadal.core.messages.ranks import RankForm
from hadal.core.messages.units import UnitUp
from hadal.core.plans import DecodePlan, PrefillPlan, StepDone
from hadal.core.seams import MAX_STEPS_IN_FLIGHT, Effect, Event, Execute, RankReset, Send, WakeAt
from hadal.roles.ranks.ranks import RankedLeader
from tests.fresh import seeds
from tests.levels import FULL, MORE
from tests.sim.experts import NUM_EXPERTS
from tests.sim.host import Host
from tests.sim.ranks import RankHost
from tests.sim.scenario import deployment
from tests.sim.world import CALM, Faults, World, is_whole

NUM_LATENCIES = 12 if FULL else 4 if MORE else 2
NOTICED_S = 0.21
"""Longest time from a death to the supervisor's report in this world, seconds."""


class Stepper:
    """Inner leader that steps for ever, with all ranks empty, and holds nothing."""

    def __init__(self, unit: str, epoch: str, num_ranks: int) -> None:
        self.living: set[int] = set()
        self.num_done = 0
        self._unit = unit
        self._role = unit.split("-")[0]
        self._epoch = epoch
        self._num_ranks = num_ranks
        self._in_flight: list[int] = []
        self._next = 0

    def start(self, now_s: float) -> list[Effect]:
        return [
            Send("front", UnitUp(self._unit, self._role, self._epoch, 8, 8)),
            WakeAt(now_s + 0.1),
        ]

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, StepDone):
            assert event.step_id == self._in_flight.pop(0), (
                f"step {event.step_id} is not the one that runs"
            )
            self.num_done += event.error is None
        elif isinstance(event, RankReset):
            assert set(event.lost) <= self.living
            assert not set(event.fresh) & (self.living - set(event.lost))
            self.living = (self.living - set(event.lost)) | set(event.fresh)
            assert {rank for rank, pool in enumerate(event.pools) if pool} == self.living
            self._in_flight.clear()
        effects: list[Effect] = []
        while self.living and len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            self._in_flight.append(self._next)
            plan = (
                PrefillPlan(self._next, ())
                if self._role == "prefill"
                else DecodePlan(self._next, (), (), ())
            )
            effects.append(Execute((plan,) * self._num_ranks))
            self._next += 1
        return effects

    def audit(self) -> list[str]:
        return []


class SteppingWorld(World):
    """World in which units step without requests."""

    def _inner(self, name: str, role: str, epoch: str, pool_name: str) -> Stepper:  # type: ignore[override]
        return Stepper(name, epoch, units_of(self.config, role).ranks)

    def _upset(self, host: Host) -> None:
        if isinstance(host, RankHost):
            super()._upset(host)
        else:
            # There is no front to notice that a leader is stuck, so kill it at once.
            self.kill_unit(host.name)

    def leaders(self) -> list[RankedLeader]:
        return [host.role for host in self.hosts.values() if isinstance(host.role, RankedLeader)]

    def are_whole(self) -> bool:
        leaders = self.leaders()
        return len(leaders) == 2 and all(is_whole(leader) for leader in leaders)


def make_world(seed: int, faults: Faults | None = None) -> SteppingWorld:
    random = Random(f"membership {seed}")
    sizes = [(random.choice([2, 3, 4, 6]), random.choice([0, NUM_EXPERTS])) for _ in range(2)]
    prefill, decode = (
        UnitsConfig(ranks=ranks, redundant_experts=redundant, max_requests=4)
        for ranks, redundant in sizes
    )
    config = deployment(unit_timeout_s=1e6, prefill=prefill, decode=decode)
    faults = faults or random.choice(
        [
            CALM,
            Faults(crash_every_s=3.0, stage_rate=0.2, until_s=20.0),
            Faults(crash_every_s=1.0, stuck_share=0.5, until_s=20.0),
            Faults(crash_every_s=0.3, stuck_share=0.3, until_s=10.0),
            Faults(crash_every_s=2.0, stuck_share=0.3, engine_rate=0.01, until_s=10.0),
        ]
    )
    wire_s = random.choice([0.0005, 0.002, 0.05])
    return SteppingWorld(
        seed, config, max_context=100, pool_blocks=(4, 4), faults=faults, wire_s=wire_s
    )


def run_seed(seed: int) -> SteppingWorld:
    world = make_world(seed)
    try:
        world.run(world.faults.until_s + 1.0)
        world.clock.run(200.0, world.are_whole)
        assert world.are_whole(), [
            (leader.membership.phase, leader.membership.members) for leader in world.leaders()
        ]
        done = [leader.inner.num_done for leader in world.leaders()]  # type: ignore[attr-defined]
        world.run(world.clock.now() + (0.0 if world.faults.engine_rate else 3.0))
        later = [leader.inner.num_done for leader in world.leaders()]  # type: ignore[attr-defined]
        assert (
            world.faults.engine_rate or min(b - a for a, b in zip(done, later, strict=True)) > 10
        ), (done, later)
    except Exception as error:
        error.add_note(
            f"membership of seed {seed} at {world.clock.now():.3f} s, {world.faults},"
            f" {world.config}"
        )
        raise
    return world


@pytest.mark.parametrize("seed", seeds(2, 4, 15))
def test_units_become_whole_and_step(seed: int) -> None:
    run_seed(seed)


def strike(world: World, victim: RankHost, how: str) -> None:
    if how == "kill":
        world.kill_unit(victim.name)
    elif how == "stop":
        victim.stop()
    else:
        victim.compute.is_hung = True


def latency_s(seed: int, how: str) -> tuple[float, float]:
    """Return seconds from a fault in mid-step until (all survivors have received a RankForm without the
    rank, the unit steps again).
    """
    world = make_world(seed, CALM)
    world.clock.run(30.0, world.are_whole)
    world.run(world.clock.now() + world.random.uniform(0.5, 1.5))
    victim = world.random.choice(
        [host for host in world.hosts.values() if isinstance(host, RankHost)]
    )
    unit = victim.name.partition(".")[0]
    survivors = {n for n in world.hosts if n.startswith(f"{unit}.")} - {victim.name}
    leader = world.hosts[unit].role
    assert isinstance(leader, RankedLeader)
    told: dict[str, float] = {}
    for name in survivors:
        host, handle = world.hosts[name], world.hosts[name].handle

        def heard(event: Event, name: str = name, handle=handle) -> None:  # type: ignore[no-untyped-def]
            if isinstance(event, RankForm) and victim.ident not in [
                (m.rank, m.epoch) for m in event.plan.members
            ]:
                told.setdefault(name, world.clock.now())
            handle(event)

        host.handle = heard  # type: ignore[method-assign]
    struck_s, num_done = world.clock.now(), leader.inner.num_done  # type: ignore[attr-defined]
    formation = leader.membership.formation
    strike(world, victim, how)

    def goes_on() -> bool:
        is_later = leader.membership.formation > formation and leader.inner.num_done > num_done + 2  # type: ignore[attr-defined]
        return is_later and leader.membership.is_running

    world.clock.run(struck_s + 60.0, goes_on)
    assert goes_on(), how
    assert told.keys() == survivors, (how, told)
    return max(told.values()) - struck_s, world.clock.now() - struck_s


@pytest.mark.promise(
    "A dead or frozen rank is detected within two seconds, its unit goes on without "
    "it, and requests get the same tokens"
)
@pytest.mark.parametrize(
    ("how", "limit_s"), [("kill", NOTICED_S + 0.1), ("stop", 2.0), ("hang", 2.0)]
)
def test_survivors_are_told_in_time(how: str, limit_s: float) -> None:
    latencies = [latency_s(seed, how) for seed in range(NUM_LATENCIES)]
    for name, found in zip(("told", "going on"), zip(*latencies, strict=True), strict=True):
        print(f"{how}: {name} after {statistics.median(found):.3f} s, worst {max(found):.3f} s")
    assert max(told for told, _ in latencies) <= limit_s

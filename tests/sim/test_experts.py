"""Live expert balancing in simulated units: skewed loads become even in spite of faults.

The world asserts equal tables in a step, no unstaged flip, and no missing expert (tests/sim/experts).
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hadal.core.config import UnitsConfig
from hadal.core.placement import without
from hadal.policy.experts.balance import Cluster, balance
from hadal.roles.experts.install import InstallState
from hadal.roles.ranks.ranks import RankedLeader
from tests.fresh import seeds
from tests.sim.experts import NUM_LAYERS, Traffic, skewed
from tests.sim.ranks import RankHost
from tests.sim.scenario import deployment
from tests.sim.test_membership import SteppingWorld, strike
from tests.sim.world import Faults, is_whole

LOCAL_OPTIMUM = 701906519838
"""Seed with which the placement search ends in a local optimum, far from the best placement."""
UNIT = "decode-0"
pytestmark = pytest.mark.slow("worlds of a thousand steps")
STEPS_TO_FOLLOW = 400
"""Steps after a change of load: half of the window's 64 steps must be new before layers flip."""


class Balanced:
    """Decode unit of four ranks with 2 layers of 12 experts, which steps without requests."""

    def __init__(
        self,
        seed: int,
        *,
        redundant: int = 4,
        expert_balance: str = "auto",
        stage_rate: float = 0.0,
    ) -> None:
        units = UnitsConfig(
            ranks=4, redundant_experts=redundant, max_requests=4, expert_balance=expert_balance
        )
        config = deployment(unit_timeout_s=1e6, decode=units)
        faults = Faults(stage_rate=stage_rate, until_s=0.0)
        self.random = Random(f"experts {seed}")
        self.world = SteppingWorld(
            seed, config, max_context=100, pool_blocks=(4, 4), faults=faults, wire_s=0.002
        )
        self.world.clock.run(30.0, lambda: UNIT in self.world.hosts and is_whole(self.leader))
        assert is_whole(self.leader)

    @property
    def leader(self) -> RankedLeader:
        return self.world.leader_of(UNIT)

    @property
    def traffic(self) -> Traffic:
        return self.world.fabrics[UNIT].traffic

    @property
    def num_steps(self) -> int:
        return len(self.traffic.balance)

    def ranks(self) -> list[RankHost]:
        return [
            host
            for host in self.world.hosts.values()
            if isinstance(host, RankHost) and host.name.startswith(UNIT)
        ]

    def run_steps(self, number: int) -> None:
        until = self.num_steps + number
        self.world.clock.run(self.world.clock.now() + 120.0, lambda: self.num_steps >= until)
        assert self.num_steps >= until, "the unit stands still"

    def run_until(self, state: InstallState) -> None:
        def is_there() -> bool:
            install = self.leader.experts.installer.installing
            return install is not None and install.state is state

        self.world.clock.run(self.world.clock.now() + 60.0, is_there)
        assert is_there(), f"no layer was ever {state}"

    def recent(self, number: int = 100) -> float:
        return float(np.mean(self.traffic.balance[-number:]))

    def within_reach(self) -> float:
        """Return the balance (mean over maximum load) that this test may require.

        Single moves end in a local optimum, which with 16 slots is sometimes far from the best
        placement: 30 seeds end at 0.97 to 1, seed 701906519838 at 0.90. Steps of 360 tokens lose
        another 0.08 to chance. So 0.85 is required where the search predicts at least 0.95, and
        proportionally less elsewhere.
        """
        cluster = Cluster.even(4, 1, 4)
        placement = self.leader.experts.placement
        plan = balance(
            self.traffic.loads_LE, cluster, current=placement, max_moves=16, weighted=True
        )
        return min(0.85, 0.9 * float(plan.balancedness_L.mean()))


@pytest.mark.parametrize("seed", [*seeds(1, 2, 6), LOCAL_OPTIMUM])
def test_balance_rises_and_rests(seed: int) -> None:
    unit = Balanced(seed)
    unit.run_steps(20)
    before = unit.recent(20)
    unit.run_steps(500)
    experts = unit.leader.experts
    after, reported = unit.recent(), experts.counts.window.balance()["experts"]
    print(
        f"seed {seed}: {before:.3f} -> {after:.3f}, {experts.moves.num_layers_flipped} flips, "
        f"{experts.moves.num_replicas_moved} moved"
    )
    assert after >= unit.within_reach(), (seed, before, after)
    assert abs(reported - after) < 0.1, (seed, reported, after)
    found = experts.moves.num_replicas_moved
    assert found == sum(rank.compute.experts.num_moved for rank in unit.ranks())
    assert experts.moves.num_layers_flipped == max(
        rank.compute.experts.num_flips for rank in unit.ranks()
    ), seed
    flips = experts.moves.num_layers_flipped
    unit.run_steps(500)
    assert experts.moves.num_layers_flipped - flips <= NUM_LAYERS, (
        f"seed {seed}: back and forth by noise"
    )


def test_without_balancing_only_gauges_move() -> None:
    unit = Balanced(3, expert_balance="off")
    unit.run_steps(300)
    experts = unit.leader.experts
    assert (experts.moves.num_layers_flipped, experts.installer.installing) == (0, None)
    assert experts.counts.window.balance().keys() == {"experts", "experts_worst"}


def test_even_loads_are_left_alone() -> None:
    unit = Balanced(5, redundant=12)  # Two replicas of each.
    unit.traffic.loads_LE = np.full_like(unit.traffic.loads_LE, 30.0)
    unit.run_steps(500)
    assert unit.leader.experts.moves.num_layers_flipped == 0


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_a_new_regime_is_followed(seed: int) -> None:
    unit = Balanced(seed)
    unit.run_steps(400)
    settled = unit.recent()
    num_flips = unit.leader.experts.moves.num_layers_flipped
    unit.traffic.loads_LE = skewed(seed + 1000)
    unit.run_steps(30)
    fallen = unit.recent(30)
    unit.run_steps(STEPS_TO_FOLLOW)
    print(f"seed {seed}: {settled:.3f}, then {fallen:.3f} -> {unit.recent():.3f}")
    assert unit.recent() >= unit.within_reach(), (seed, settled, fallen, unit.recent())
    assert unit.leader.experts.moves.num_layers_flipped > num_flips


@pytest.mark.promise(
    "A failed or late stage leaves the old placement in force, as does a new formation"
)
@pytest.mark.parametrize("how", ["kill", "stop", "hang"])
@pytest.mark.parametrize("state", list(InstallState))
@pytest.mark.parametrize("seed", seeds(1, 1))
def test_a_rank_lost_in_the_middle_leaves_the_old_placement(
    seed: int, state: InstallState, how: str
) -> None:
    unit = Balanced(seed)
    unit.run_until(state)
    experts = unit.leader.experts
    before, flips = experts.placement, experts.moves.num_layers_flipped
    victim = unit.random.choice(unit.ranks())
    strike(unit.world, victim, how)
    formation = unit.leader.membership.formation
    unit.world.clock.run(
        unit.world.clock.now() + 60.0, lambda: unit.leader.membership.formation > formation
    )
    assert unit.leader.membership.formation > formation, (seed, state, how)
    # All ranks may have flipped before the loss was known; otherwise the move is abandoned.
    num_done = experts.moves.num_layers_flipped - flips
    assert num_done + experts.moves.num_abandoned >= 1, (seed, state, how)
    absent = set(range(4)) - unit.leader.membership.members.keys()
    left = without(before, absent) if absent else before
    assert num_done or unit.leader.membership.placement.to_bytes() == left.to_bytes(), (
        seed,
        state,
        how,
    )
    unit.world.clock.run(unit.world.clock.now() + 60.0, lambda: is_whole(unit.leader))
    unit.run_steps(400)
    assert unit.recent() >= unit.within_reach(), (seed, state, how)


def test_errors_of_staging_are_survived() -> None:
    unit = Balanced(1, stage_rate=1.0)
    unit.run_steps(300)
    experts = unit.leader.experts
    assert experts.moves.num_abandoned >= 1
    assert experts.moves.num_replicas_moved == 0
    unit.world.fabrics[UNIT].stage_fault_rate = 0.0
    unit.run_steps(600)
    assert experts.moves.num_replicas_moved > 0
    assert unit.recent() >= 0.85
    assert any("no such tensor" in note for note in unit.leader.take_notes())


def test_staging_that_never_ends_stops_no_step() -> None:
    unit = Balanced(1)
    unit.world.fabrics[UNIT].stage_s = 1000.0
    unit.run_steps(400)
    experts = unit.leader.experts
    assert experts.moves.num_abandoned >= 1
    assert experts.moves.num_replicas_moved == 0
    assert any("did not stage" in note for note in unit.leader.take_notes())
    unit.world.fabrics[UNIT].stage_s = 0.01
    unit.run_steps(600)
    assert unit.recent() >= 0.85

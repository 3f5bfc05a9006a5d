"""One host's link is slow: its unit continues without the host, which rejoins once the link is normal."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from hadal.core.config import UnitsConfig
from hadal.roles.ranks.ranks import RankedLeader
from hadal.roles.ranks.slow import NUM_STRETCHES, STRETCH_S
from tests.fresh import seeds
from tests.sim.scenario import deployment, longest_output, random_generation
from tests.sim.test_membership import SteppingWorld
from tests.sim.world import World, is_whole

pytestmark = pytest.mark.slow("units that step for a minute")
UNIT = "decode-0"
NOTICED_S = (NUM_STRETCHES + 2) * STRETCH_S
"""Longest time until a slow host is noticed, seconds: the first stretch of STRETCH_S may not show it,
and the last one may last longer.
"""
LINK_S = 0.1
"""Mean delay of a message over the slow link, seconds; without it, a step takes a tenth of that."""
LOOK_S = 0.25
SLOW_FROM_S, SLOW_UNTIL_S = 5.0, 55.0
GAP_S = 20.0
"""Longest time that a stream stands still, seconds."""


def on_hosts(num_ranks: int, rest_s: float = 30.0) -> dict[str, object]:
    """Return fields of a deployment with a decode unit that has a host for each rank."""
    decode = UnitsConfig(ranks=num_ranks, ranks_per_node=1, max_requests=4)
    return {"decode": decode, "slow_host_rest_s": rest_s}


class Stepping:
    """Unit of four ranks on four hosts that steps without requests."""

    def __init__(self, seed: int, rest_s: float = 30.0) -> None:
        self.random = Random(f"slow hosts {seed}")
        config = deployment(unit_timeout_s=1e6, **on_hosts(4, rest_s))
        self.world = SteppingWorld(seed, config, max_context=100, pool_blocks=(4, 4))
        self.until(lambda: UNIT in self.world.hosts and is_whole(self.leader), 30.0)
        self.slow = self.random.randrange(4)

    @property
    def leader(self) -> RankedLeader:
        return self.world.leader_of(UNIT)

    @property
    def members(self) -> set[int]:
        return set(self.leader.membership.members)

    @property
    def link_s(self) -> dict[int, float]:
        return self.world.fabrics[UNIT].link_s

    def until(self, condition: Callable[[], bool], within_s: float) -> float:
        """Run until the condition holds; return how long that took."""
        began_s = self.world.clock.now()
        self.world.clock.run(began_s + within_s, condition)
        assert condition(), f"not within {within_s} s"
        return self.world.clock.now() - began_s

    def is_without(self) -> bool:
        return self.members == {0, 1, 2, 3} - {self.slow}

    def is_all(self) -> bool:
        return is_whole(self.leader)


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_a_unit_goes_on_without_it_and_takes_it_back(seed: int) -> None:
    unit = Stepping(seed)
    unit.link_s[unit.slow] = LINK_S
    took_s = unit.until(unit.is_without, NOTICED_S)
    unit.link_s.clear()
    rested_s = unit.until(unit.is_all, 40.0)
    print(
        f"seed {seed}: without rank {unit.slow} after {took_s:.1f} s, whole {rested_s:.1f} s later"
    )
    assert rested_s + LOOK_S >= 30.0
    unit.world.run(unit.world.clock.now() + 10 * NOTICED_S)
    assert unit.is_all()


@pytest.mark.promise("A host that is still slow then rests for twice as long.")
def test_a_link_that_stays_slow_is_tried_again_after_twice_as_long() -> None:
    unit = Stepping(3)
    unit.link_s[unit.slow] = LINK_S
    unit.until(unit.is_without, NOTICED_S)
    rests_s = []
    for _ in range(3):
        rests_s.append(unit.until(unit.is_all, 200.0))
        unit.until(unit.is_without, NOTICED_S)
    print("rests:", rests_s)
    assert [round(rest_s, -1) for rest_s in rests_s] == [30.0, 60.0, 120.0]


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_a_unit_that_is_slow_everywhere_stays_whole(seed: int) -> None:
    unit = Stepping(seed)
    unit.link_s.update(dict.fromkeys(range(4), LINK_S))
    formation = unit.leader.membership.formation
    unit.world.run(unit.world.clock.now() + 10 * NOTICED_S)
    assert unit.leader.membership.formation == formation
    assert unit.is_all()


def test_who_wants_no_rests_gets_none() -> None:
    unit = Stepping(4, rest_s=0.0)
    unit.link_s[unit.slow] = LINK_S
    formation = unit.leader.membership.formation
    unit.world.run(unit.world.clock.now() + 10 * NOTICED_S)
    assert unit.leader.membership.formation == formation
    assert unit.is_all()


class Streaming:
    """Twelve streams on a unit of four hosts. One link is slow from SLOW_FROM_S to SLOW_UNTIL_S."""

    def __init__(self, seed: int, rest_s: float) -> None:
        random = Random(f"slow streams {seed}")
        config = deployment(**on_hosts(4, rest_s))
        self.world = world = World(
            seed, config, max_context=3000, pool_blocks=(200, 200), step_s=0.02, check_every=50
        )
        for number in range(12):
            generation = msgspec.structs.replace(
                random_generation(random, f"r{number}", 60, 20), max_tokens=2500, stop_ids=()
            )
            longest = longest_output(world, len(generation.prompt))
            world.submit_at(random.uniform(1.0, 3.0), generation, longest)
        world.run(SLOW_FROM_S)
        links_s = world.fabrics[UNIT].link_s
        links_s[random.randrange(4)] = LINK_S
        self.gaps, before = Gaps(world), self.num_tokens
        self.sizes = [4]
        """Numbers of members of the unit: one entry per change."""
        while world.clock.now() < SLOW_UNTIL_S:
            world.run(world.clock.now() + LOOK_S)
            self.gaps.look()
            size = len(world.leader_of(UNIT).membership.members)
            self.sizes += [size] if size != self.sizes[-1] else []
        self.num_slow_tokens = self.num_tokens - before
        links_s.clear()
        world.run_to_the_end(4000.0)

    @property
    def num_tokens(self) -> int:
        return sum(len(client.received) for client in self.world.clients.values())


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_streams_go_on_and_no_token_is_another(seed: int) -> None:
    """Clients check the tokens."""
    rested, bearing = Streaming(seed, 30.0), Streaming(seed, 0.0)
    print(
        f"seed {seed}: longest gap {rested.gaps.longest_s:.2f} s, {rested.num_slow_tokens} tokens and"
        f" {bearing.num_slow_tokens}"
    )
    assert rested.sizes == [4, 3, 4, 3], "taken back after its rest, and found slow again"
    assert bearing.sizes == [4]
    assert rested.num_slow_tokens > 2 * bearing.num_slow_tokens
    assert rested.gaps.longest_s <= GAP_S
    finals = [client.final for client in rested.world.clients.values()]
    assert {final and final.error for final in finals} == {None}


class Gaps:
    """Meter of the longest time for which a running stream got no token."""

    def __init__(self, world: World) -> None:
        self.longest_s = 0.0
        self._world = world
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self) -> None:
        now_s = self._world.clock.now()
        for name, client in self._world.clients.items():
            num, since_s = self._seen.get(name, (-1, now_s))
            if len(client.received) != num or client.final is not None:
                self._seen[name] = len(client.received), now_s
            else:
                self.longest_s = max(self.longest_s, now_s - since_s)

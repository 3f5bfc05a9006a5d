"""A host that is short of processors: all processes are late, and none is given up for that."""

from __future__ import annotations

import pytest

from hadal.roles.ranks.ranks import RankedLeader
from tests.fresh import seeds
from tests.sim.scenario import ranked_world, uneven_world
from tests.sim.starving import Starving
from tests.sim.test_world import LIMIT_S
from tests.sim.world import Faults, World


def starved(world: World, apart_s: float) -> World:
    world.starving = Starving(1.0, 30.0, apart_s)
    world.run(31.0)
    world.run_to_the_end(LIMIT_S)
    errors = {client.final.error for client in world.clients.values() if client.final is not None}
    assert errors <= {None, "cancelled: the client went away"}
    return world


@pytest.mark.promise(
    "Time without a processor does not count, nor does time in which the failure "
    "detector itself did not run."
)
@pytest.mark.parametrize("seed", seeds(1, 2, 4))
@pytest.mark.parametrize("apart_s", [0.3, 2.0, 5.0])
def test_nobody_is_given_up_where_everybody_is_late(seed: int, apart_s: float) -> None:
    world = starved(uneven_world(seed, is_calm=True), apart_s)
    assert world.num_deaths == 0
    leaders = [host.role for host in world.hosts.values() if isinstance(host.role, RankedLeader)]
    assert [leader.membership.formation for leader in leaders] == [1] * len(leaders)
    assert world.num_returned["rank lost"] == 0


@pytest.mark.parametrize("seed", seeds(2, 2, 4))
def test_who_is_frozen_there_goes_all_the_same(seed: int) -> None:
    world = ranked_world(seed)
    world.faults = Faults(crash_every_s=3.0, stuck_share=0.6, until_s=20.0)
    world.clock.at(2.0, world._strike)
    world.quiet_from_s = 31.0
    starved(world, 1.0)
    assert world.num_deaths > 0

"""Random worlds for the fleet: units start, stop, fail to start, die in a drain; messages are lost.

Every stream ends complete, a draining unit gets no new work, and at rest the fleet is at its minimum.
"""

from __future__ import annotations

import pytest

from tests.fresh import seeds
from tests.sim.fleet import FleetWorld, fleet_world

NUM_SEEN = 14
"""Number of seeds, enough to reach what the tests are for."""
LIMIT_S = 900.0
"""Limit of a run in simulated seconds: the loss of a starting unit is noticed only after ten minutes."""


def run(seed: int) -> FleetWorld:
    """Run one seed to its end, and until the fleet is at rest. An error names the seed."""
    world = fleet_world(seed)
    try:
        world.run_to_the_end(LIMIT_S)
        for name, client in world.clients.items():
            error = client.final.error if client.final is not None else None
            assert error is None or client.final.error_status == 499, f"{name} failed: {error}"
        world.clock.run(world.clock.now() + LIMIT_S, world.is_at_rest)
        assert world.is_at_rest(), f"{world.fleet.counts()}, {world.num_offered} nodes offered"
        assert world.front.check() == []
    except Exception as error:
        error.add_note(
            f"fleet_world({seed}) at {world.clock.now():.3f} s, {world.faults},"
            f" {world.fleet_faults}"
        )
        raise
    return world


@pytest.mark.parametrize("seed", seeds(1, 1, 30))
def test_no_request_is_lost_while_units_come_and_go(seed: int) -> None:
    run(seed)


@pytest.mark.more("holds the seeds, not the code")
def test_the_seeds_do_what_they_are_for() -> None:
    worlds = [run(seed) for seed in range(NUM_SEEN)]
    assert sum(world.num_drains for world in worlds) > 20
    assert sum(world.num_deaths for world in worlds) > 20
    calm = [world for world in worlds if world.faults.until_s == 0.0]
    assert calm
    assert sum(world.num_drains for world in calm) > 5
    # Without deaths and lost messages, a unit is stopped only when it is empty.
    assert [world.num_forced for world in calm] == [0] * len(calm)

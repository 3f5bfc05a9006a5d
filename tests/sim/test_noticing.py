"""Times until the front, a leader and clients notice a loss, under default timeouts."""

from __future__ import annotations

import pytest

from hadal.core.config import Deployment, UnitsConfig
from hadal.core.messages.generation import Generation
from hadal.core.plans import Sampling
from tests.fresh import seeds
from tests.sim.world import Faults, World

STRUCK_S = 1.0
FROZEN_LEADER_S = 3.0
DEAD_RANK_S = 2.0
STILL_S = 3.0
"""Longest time that streams stand still when their leader dies and its ranks live, seconds."""
SEEDS = seeds(1, 3, 20)


def make_world(seed: int) -> World:
    """Return a world with three streams that decode when the test strikes."""
    config = Deployment(
        prefill=UnitsConfig(ranks=2, max_requests=8), decode=UnitsConfig(ranks=3, max_requests=8)
    )
    world = World(
        seed,
        config,
        max_context=4000,
        pool_blocks=(80, 120),
        faults=Faults(until_s=0.0, succession_share=1.0),
    )
    for number in range(3):
        name, prompt = f"r{number}", tuple(range(30 + number))
        generation = Generation(name, prompt, (), 200, (), 0, Sampling(seed=number), 0)
        world.submit_at(0.2, generation, 200)
    world.run(STRUCK_S)
    assert all(client.received and client.final is None for client in world.clients.values())
    return world


def num_tokens(world: World) -> list[int]:
    return [len(client.received) for client in world.clients.values()]


def time_until_all_go_on(world: World) -> float:
    """Return how long it takes until each stream has a token more."""
    start_s, before = world.clock.now(), num_tokens(world)

    def all_went_on() -> bool:
        return all(now > was for now, was in zip(num_tokens(world), before, strict=True))

    world.clock.run(start_s + 60.0, all_went_on)
    assert all_went_on()
    return world.clock.now() - start_s


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("unit", ["decode-0", "prefill-0"])
def test_a_frozen_leader_is_given_up_and_followed_by_another(unit: str, seed: int) -> None:
    world = make_world(seed)
    world.hosts[unit].is_stuck = True
    world.clock.run(STRUCK_S + 60.0, lambda: world.num_deaths > 0)
    assert world.clock.now() - STRUCK_S <= FROZEN_LEADER_S
    assert unit == "prefill-0" or time_until_all_go_on(world) <= STILL_S
    assert world.front.totals.retries == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_go_on_soon_after_their_leader_died(seed: int) -> None:
    world = make_world(seed)
    world.kill_unit("decode-0")
    world.run(world.clock.now() + 0.05)  # What it had sent arrives.
    assert time_until_all_go_on(world) <= STILL_S
    assert world.front.totals.retries == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_front_knows_of_dead_ranks_soon(seed: int) -> None:
    world = make_world(seed)
    start = world.start_unit
    world.start_unit = lambda name: None if name == "decode-0.2" else start(name)  # type: ignore[method-assign]
    world.kill_unit("decode-0.2")

    def is_known() -> bool:
        load = world.front.units.by_name["decode-0"].load
        return load is not None and (load.num_ranks, load.absent) == (2, (2,))

    world.clock.run(STRUCK_S + 60.0, is_known)
    assert is_known()
    assert world.clock.now() - STRUCK_S <= DEAD_RANK_S

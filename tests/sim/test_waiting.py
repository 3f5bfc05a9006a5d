"""Deadlines of waiting requests, and running requests without one."""

from __future__ import annotations

from random import Random

import msgspec

from hadal.core.config import LimitsConfig, UnitsConfig
from tests.sim.engine import VOCAB
from tests.sim.scenario import deployment, longest_output, random_generation, words
from tests.sim.world import World

TIMEOUT_S = 60.0
SLOW = {"heartbeat_s": 1.0, "unit_timeout_s": 12.0, "rank_timeout_s": 6.0}


def test_a_stream_of_15_minutes_outlives_a_timeout_of_one() -> None:
    limits = LimitsConfig(request_timeout_s=TIMEOUT_S)
    world = World(
        1, deployment(limits=limits, **SLOW), max_context=2000, pool_blocks=(40, 40), step_s=1.5
    )
    generation = random_generation(Random(1), "long", 20, 20)
    generation = msgspec.structs.replace(generation, max_tokens=1000, stop_ids=())
    world.submit_at(1.0, generation, longest_output(world, len(generation.prompt)))
    world.run(600.0)
    assert world.clients["long"].final is None, "it runs"
    world.run_to_the_end(4000.0)
    final = world.clients["long"].final
    assert final is not None
    assert final.error is None
    assert world.clock.now() > 900.0


def test_what_waits_for_its_turn_has_a_deadline() -> None:
    limits = LimitsConfig(request_timeout_s=TIMEOUT_S, max_running=1)
    world = World(
        1, deployment(limits=limits, **SLOW), max_context=2000, pool_blocks=(40, 40), step_s=1.5
    )
    for at_s, name in ((1.0, "long"), (2.0, "behind")):
        generation = random_generation(Random(1), name, 20, 20)
        generation = msgspec.structs.replace(generation, max_tokens=500, stop_ids=())
        world.submit_at(at_s, generation, longest_output(world, len(generation.prompt)))
    world.run(2.0 + TIMEOUT_S + 1.0)
    final = world.clients["behind"].final
    assert final is not None
    assert "within 60 s" in (final.error or "")
    world.run_to_the_end(4000.0)
    assert world.clients["long"].final is not None
    assert world.clients["long"].final.error is None


def test_64_requests_without_a_limit_all_end_in_a_pool_for_one() -> None:
    """Each request may fill the rest of the context, which is the whole pool."""
    random, num_blocks = Random(1), 40
    config = deployment(
        limits=LimitsConfig(), decode=UnitsConfig(max_requests=16), prefill=UnitsConfig()
    )
    world = World(
        1, config, max_context=num_blocks * 64, pool_blocks=(40, num_blocks), check_every=1000
    )
    for number in range(64):
        prompt = words(random, random.randint(5, 100))
        longest = longest_output(world, len(prompt))
        generation = msgspec.structs.replace(
            random_generation(random, f"r{number}", 20, 20),
            prompt=prompt,
            max_tokens=longest,
            stop_ids=(random.randrange(VOCAB),),
            min_tokens=random.randint(5, 100),
        )
        world.submit_at(random.uniform(0.1, 2.0), generation, longest)
    world.run_to_the_end(4000.0)
    errors = {name: client.final and client.final.error for name, client in world.clients.items()}
    assert set(errors.values()) == {None}, errors

"""Priority under overload, in simulated time: high priority passes low, and low does not starve."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from hadal.core.balance import OFF
from hadal.core.config import CacheConfig, Deployment, LimitsConfig, UnitsConfig
from hadal.core.messages.generation import Generation
from hadal.core.plans import Sampling
from hadal.policy.batching import AGE_S
from tests.fresh import seeds
from tests.levels import MORE
from tests.sim.world import World

STREAM_S = 0.1, 2 * AGE_S
STEP_S, GAP_S = (0.01, 0.035) if MORE else (0.02, 0.07)
"""Seconds of an engine's step; seconds between arrivals."""
LOW_AT_S = 2.5
"""Arrival of the priority-0 request: by then more requests wait than fit."""
SLACK_S = 2.0
"""Tolerance in seconds, for work already running when a request's turn comes, and order within a step."""


def overloaded_world(random: Random, seed: int, priority: int) -> World:
    """Return a world with more requests of `priority` than can be served, and one of priority 0."""
    config = Deployment(
        chunk_tokens=64,
        heartbeat_s=0.1,
        unit_timeout_s=5.0,
        prefill=UnitsConfig(ranks=2, max_requests=4),
        decode=UnitsConfig(max_requests=4),
        limits=LimitsConfig(max_queued=10_000, max_retries=10_000, request_timeout_s=4000.0),
        cache=CacheConfig(memory=OFF),
    )
    world = World(
        seed, config, max_context=10_000, pool_blocks=(40, 40), step_s=STEP_S, check_every=20
    )
    at_s, number = STREAM_S[0], 0
    while at_s < STREAM_S[1]:
        prompt = tuple(random.randrange(50) for _ in range(random.randint(5, 120)))
        made = Generation(
            f"high-{number}", prompt, (), random.randint(5, 25), (), 0, Sampling(), 0, priority
        )
        world.submit_at(at_s, made, made.max_tokens)
        at_s, number = at_s + random.uniform(0.5, 1.5) * GAP_S, number + 1
    low = Generation("low", tuple(range(40)), (), 5, (), 0, Sampling(), 0)
    world.submit_at(LOW_AT_S, low, 5)
    return world


def end_of_low(world: World) -> tuple[float, list[float]]:
    """Return when the priority-0 request ended, and the arrivals of requests still open then."""
    world.clock.run(
        3000.0, lambda: "low" in world.clients and world.clients["low"].final is not None
    )
    records = world.front.requests.by_id
    waiting = {name: record.generation.arrived_s for name, record in records.items()}
    at_s = world.clock.now()
    assert waiting, "there was no overload"
    return at_s, sorted(waiting.values())


@pytest.mark.parametrize("seed", seeds(1, 1))
def test_a_stream_of_higher_priority_passes_and_does_not_starve(seed: int) -> None:
    print("seed", seed)
    ends_s = {}
    for priority in (0, 1):
        world = overloaded_world(Random(seed), seed, priority)
        ends_s[priority], waiting_s = end_of_low(world)
        # The request of priority 0 had its turn together with requests that arrived
        # `priority * AGE_S` later, so no request older than these waits.
        turn_s = LOW_AT_S + priority * AGE_S
        assert sum(arrived_s < turn_s - SLACK_S for arrived_s in waiting_s) == 0
        world.run_to_the_end(3000.0)
        assert all(
            msgspec.structs.asdict(c.final)["error"] is None
            for c in world.clients.values()
            if c.final
        )
    assert ends_s[0] + SLACK_S < ends_s[1]
    assert ends_s[1] < world.clock.now() - SLACK_S, "it was the last of all"

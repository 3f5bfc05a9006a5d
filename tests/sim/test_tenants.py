"""Two tenants in simulated time: a flood or a batch of one costs the other next to nothing, and a
batch alone is as quick as requests.
"""

from __future__ import annotations

import statistics

import pytest

from hadal.core.balance import OFF
from hadal.core.config import CacheConfig, Deployment, LimitsConfig, UnitsConfig
from hadal.core.messages.generation import Generation
from hadal.core.plans import Sampling
from tests.fresh import fresh
from tests.sim.world import World

FLOOD_AT_S = 0.5
NUM_FLOOD = 1536
NUM_ASKED = 12
ANSWER_TOKENS = 30


def generation(name: str, tenant: str, num_prompt: int, num_output: int) -> Generation:
    prompt = tuple(hash((name, position)) % 50 for position in range(num_prompt))
    return Generation(name, prompt, (), num_output, (), 0, Sampling(), 0, tenant=tenant)


def world_of(seed: int, prefill_ranks: int = 1) -> World:
    config = Deployment(
        chunk_tokens=64,
        heartbeat_s=0.1,
        unit_timeout_s=5.0,
        prefill=UnitsConfig(ranks=prefill_ranks, max_requests=8),
        decode=UnitsConfig(max_requests=16),
        limits=LimitsConfig(max_queued=NUM_FLOOD, request_timeout_s=4000.0),
        cache=CacheConfig(memory=OFF),
    )
    return World(seed, config, max_context=10_000, pool_blocks=(80, 80), check_every=20)


def times_s(
    seed: int, *, is_flooded: bool, prefill_ranks: int = 1, flood_of: str = "flood"
) -> list[float]:
    """Return the seconds that each of the other tenant's consecutive requests took."""
    world = world_of(seed, prefill_ranks)
    begun_s: dict[str, float] = {}

    def ask() -> None:
        name = f"other-{len(begun_s)}"
        begun_s[name] = world.clock.now()
        world.submit(generation(name, "other", 20, ANSWER_TOKENS), ANSWER_TOKENS)

    def flood() -> None:
        for number in range(NUM_FLOOD):
            world.submit(generation(f"flood-{number}", flood_of, 20, 100), 100)

    taken_s: list[float] = []
    # The first request comes before the flood, so that the front already knows its tenant.
    world.clock.at(0.4, ask)
    if is_flooded:
        world.clock.at(FLOOD_AT_S, flood)
    world.clock.run(3000.0, lambda: ended(world, begun_s))
    for _ in range(NUM_ASKED):
        world.clock.run(world.clock.now() + 0.1)
        ask()
        world.clock.run(3000.0, lambda: ended(world, begun_s))
        taken_s.append(world.clock.now() - list(begun_s.values())[-1])
    # The flood is not over.
    assert not is_flooded or world.front.requests.num_queued_of(flood_of) > NUM_FLOOD // 2
    return taken_s


def ended(world: World, begun_s: dict[str, float]) -> bool:
    """Return whether all requests of the other tenant are answered."""
    finals = [world.clients[name].final for name in begun_s if name in world.clients]
    assert all(final is None or final.error is None for final in finals)
    return (
        bool(finals) and len(finals) == len(begun_s) and all(final is not None for final in finals)
    )


@pytest.mark.slow("a flood of 1,536 requests")
@pytest.mark.parametrize(
    ("seed", "prefill_ranks"),
    [
        (0, 1),
        pytest.param(
            fresh().randrange(2**40), 2, marks=pytest.mark.more("a fresh seed, two ranks")
        ),
    ],
)
def test_1536_generations_cost_another_tenant_at_most_twice_its_time(
    seed: int, prefill_ranks: int
) -> None:
    print("seed", seed)
    alone_s = statistics.mean(times_s(seed, is_flooded=False, prefill_ranks=prefill_ranks))
    flooded_s = times_s(seed, is_flooded=True, prefill_ranks=prefill_ranks)
    print("alone", alone_s, "flooded", statistics.mean(flooded_s), "worst", max(flooded_s))
    assert max(flooded_s) <= 2 * alone_s


@pytest.mark.slow("a batch of 1,536 lines")
def test_a_batch_costs_another_tenant_next_to_nothing() -> None:
    alone_s = statistics.mean(times_s(0, is_flooded=False))
    beside_s = times_s(0, is_flooded=True, flood_of="other/batch")
    print("alone", alone_s, "beside", statistics.mean(beside_s), "worst", max(beside_s))
    assert statistics.mean(beside_s) <= 1.25 * alone_s


def test_a_batch_alone_takes_as_long_as_requests() -> None:
    """Both send 100 requests to 16 slots."""

    def end_s(tenant: str) -> float:
        world = world_of(0)
        for number in range(100):
            world.submit_at(0.4, generation(f"r{number}", tenant, 20, 60), 60)
        world.clock.run(0.5)
        names = dict.fromkeys(world.clients, 0.0)
        assert len(names) == 100
        world.clock.run(3000.0, lambda: ended(world, names))
        return world.clock.now()

    batch_s, requests_s = end_s("a/batch"), end_s("a")
    print("batch", batch_s, "requests", requests_s)
    assert batch_s <= 1.1 * requests_s

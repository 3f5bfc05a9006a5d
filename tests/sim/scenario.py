"""Worlds of seeds: a deployment, a workload and its faults, all drawn from the seed."""

from __future__ import annotations

from random import Random
from typing import Any

from hadal.core.config import Deployment, LimitsConfig, UnitsConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.core.plans import Sampling
from tests.sim.engine import VOCAB
from tests.sim.world import CALM, RESTARTED, Faults, World

RANK_TIMEOUT_S = 1.5
ENDLESS = LimitsConfig(max_retries=10_000, request_timeout_s=4000.0)
"""Limits that no request reaches, so that each ends by its own stop or length."""


def deployment(**fields: Any) -> Deployment:
    """Return a deployment that notices losses soon and retries without end."""
    common: dict[str, Any] = {
        "heartbeat_s": 0.1,
        "unit_timeout_s": 2 * RANK_TIMEOUT_S,
        "rank_timeout_s": RANK_TIMEOUT_S,
        "limits": ENDLESS,
    }
    return Deployment(**common | fields)


def words(random: Random, num: int) -> tuple[int, ...]:
    return tuple(random.randrange(VOCAB) for _ in range(num))


def random_sampling(random: Random) -> Sampling:
    return Sampling(
        presence_penalty=random.choice([0.0, 0.0, 0.5]),
        repetition_penalty=random.choice([1.0, 1.0, 1.1]),
        seed=random.randrange(1000),
        num_logprobs=random.choice([-1, -1, 0]),
    )


def random_generation(
    random: Random, request_id: str, max_prompt: int, max_output: int
) -> Generation:
    num_prompt = random.choice(
        [random.randint(1, 20), random.randint(1, max_prompt), BLOCK_TOKENS, max_prompt]
    )
    return Generation(
        request_id=request_id,
        prompt=words(random, min(num_prompt, max_prompt)),
        output=(),
        max_tokens=random.choice([1, 2, random.randint(1, max_output), max_output]),
        stop_ids=tuple(random.sample(range(VOCAB), random.choice([0, 0, 1, 2]))),
        min_tokens=random.choice([0, 0, random.randint(0, 20)]),
        sampling=random_sampling(random),
        attempt=0,
    )


def longest_output(world: World, num_prompt: int) -> int:
    """Return the maximum number of output tokens after a prompt of `num_prompt` tokens, by the world's
    context and one unit's blocks.
    """
    capacity = (min(world.pool_blocks.values()) - 1) * BLOCK_TOKENS
    return min(world.max_context, capacity + 1) - num_prompt


def random_world(seed: int) -> World:
    """Return a small deployment under pressure: few blocks and slots, short leases, faults."""
    random = Random(f"scenario {seed}")
    blocks = random.randint(4, 10), random.randint(4, 14)
    lease_s = random.choice([0.3, 2.0, 30.0])
    max_waiting = random.choice([1, 4, 64])
    config = deployment(
        chunk_tokens=random.choice([7, 16, 64, 512]),
        lease_s=lease_s,
        unit_timeout_s=1.0 + RANK_TIMEOUT_S,
        prefill=UnitsConfig(
            units=random.choice([1, 1, 2]),
            max_requests=random.randint(1, 8),
            max_waiting=max_waiting,
        ),
        decode=UnitsConfig(
            units=random.choice([1, 1, 2]),
            max_requests=random.randint(1, 8),
            max_waiting=max_waiting,
        ),
        limits=LimitsConfig(
            max_running=random.choice([2, 256]), max_retries=10_000, request_timeout_s=4000.0
        ),
    )
    faults = random.choice(
        [
            CALM,
            Faults(duplicate_rate=0.1, until_s=0.0),
            Faults(engine_rate=0.02, until_s=0.0),
            Faults(crash_every_s=1.0, until_s=8.0),
            Faults(
                crash_every_s=0.5,
                stuck_share=0.3,
                duplicate_rate=0.05,
                engine_rate=0.01,
                until_s=6.0,
            ),
            RESTARTED,
        ]
    )
    max_context = random.choice([200, 400, 10_000])
    world = World(seed, config, max_context=max_context, pool_blocks=blocks, faults=faults)
    add_clients(world, random)
    return world


def add_clients(world: World, random: Random) -> None:
    """Add requests that fit, over a few seconds. Some are cancelled."""
    longest = longest_output(world, 0)
    # Short prompts with long answers outgrow the pool after admission, which causes preemption.
    max_prompt, max_output = random.choice([(longest - 2, 80), (longest - 2, 80), (40, 250)])
    span_s = random.choice([0.1, 3.0])
    for number in range(random.randint(3, 20)):
        request_id = f"r{number}"
        generation = random_generation(random, request_id, max_prompt, max_output)
        at_s = random.uniform(0.1, 0.1 + span_s)
        world.submit_at(at_s, generation, longest_output(world, len(generation.prompt)))
        if random.random() < 0.15:
            world.cancel_at(at_s + random.expovariate(1.0), request_id)


def pressured_world(seed: int) -> World:
    """Return a world of requests that fit on arrival and outgrow the pool: constant preemption and pulls."""
    random = Random(f"pressure {seed}")
    config = deployment(
        chunk_tokens=64,
        unit_timeout_s=1.0 + RANK_TIMEOUT_S,
        prefill=UnitsConfig(max_requests=4),
        decode=UnitsConfig(max_requests=8),
    )
    blocks = random.randint(7, 12)
    world = World(
        seed,
        config,
        max_context=10_000,
        pool_blocks=(12, blocks),
        wire_s=random.choice([0.0, 0.002, 0.05]),
        pull_s=random.choice([0.02, 0.5]),
    )
    for number in range(10):
        num_prompt = random.randint(1, 63)
        prompt, num_output = words(random, num_prompt), random.randint(66, 256)
        sampling = random_sampling(random)
        generation = Generation(f"r{number}", prompt, (), num_output, (), 0, sampling, 0)
        world.submit_at(random.uniform(0.1, 1.0), generation, longest_output(world, num_prompt))
        if random.random() < 0.2:
            world.cancel_at(random.uniform(0.5, 4.0), f"r{number}")
    return world


def ranked_world(seed: int) -> World:
    """Return a world of ranks that die, stop, hang and lose each other; few blocks and slots."""
    random = Random(f"ranks {seed}")

    def units(ranks: int) -> UnitsConfig:
        return UnitsConfig(
            units=random.choice([1, 1, 2]),
            ranks=ranks,
            max_requests=random.randint(1, 5),
            max_waiting=64,
            redundant_experts=random.choice([0, 12]) if ranks > 1 else 0,
            min_split_tokens=random.choice([2, 32]),
            overlap=random.choice(["auto", "prefill_dual", "sequential"]),
        )

    config = deployment(
        chunk_tokens=random.choice([7, 16, 64]),
        lease_s=random.choice([2.0, 30.0]),
        prefill=units(random.choice([1, 2, 3])),
        decode=units(random.choice([2, 3, 4])),
    )
    faults = random.choice(
        [
            CALM,
            Faults(engine_rate=0.01, until_s=0.0),
            Faults(crash_every_s=0.4, until_s=5.0),
            Faults(stage_rate=0.5, until_s=0.0),
            Faults(crash_every_s=0.5, stuck_share=0.5, until_s=8.0),
            Faults(
                crash_every_s=1.0, stuck_share=0.3, stage_rate=0.2, engine_rate=0.005, until_s=6.0
            ),
            Faults(
                crash_every_s=1.0,
                stuck_share=0.3,
                duplicate_rate=0.05,
                engine_rate=0.005,
                until_s=6.0,
            ),
            Faults(crash_every_s=1.5, stuck_share=0.3, front_restarts=2, until_s=6.0),
        ]
    )
    blocks = random.randint(4, 8), random.randint(4, 8)
    world = World(
        seed,
        config,
        max_context=random.choice([200, 10_000]),
        pool_blocks=blocks,
        faults=faults,
        wire_s=random.choice([0.0005, 0.002, 0.02]),
    )
    add_clients(world, random)
    return world


def uneven_world(seed: int, request_balance: str = "auto", *, is_calm: bool = False) -> World:
    """Return a world of uneven requests on several decode ranks with free blocks; unless `is_calm`,
    faults happen while requests move between ranks.
    """
    random = Random(f"uneven {seed}")
    config = deployment(
        chunk_tokens=2048,
        heartbeat_s=0.05,
        prefill=UnitsConfig(max_requests=16),
        decode=UnitsConfig(
            ranks=random.choice([3, 4]), max_requests=8, request_balance=request_balance
        ),
    )
    faults = random.choice(
        [
            CALM,
            Faults(engine_rate=0.02, until_s=0.0),
            Faults(crash_every_s=0.5, until_s=6.0),
            Faults(crash_every_s=0.7, stuck_share=0.4, engine_rate=0.002, until_s=6.0),
            Faults(
                crash_every_s=1.0,
                stuck_share=0.2,
                duplicate_rate=0.05,
                front_restarts=2,
                until_s=6.0,
            ),
        ]
    )
    world = World(
        seed,
        config,
        max_context=4000,
        pool_blocks=(200, random.choice([60, 120])),
        faults=CALM if is_calm else faults,
        wire_s=random.choice([0.0005, 0.002]),
        pull_s=random.choice([0.005, 0.02, 0.1]),
    )
    for number in range(30):
        num_prompt, num_output = random.choice(
            [(30, 40), (60, 300), (500, 120), (random.randint(1, 1200), 200)]
        )
        prompt = words(random, num_prompt)
        stop_ids = tuple(random.sample(range(VOCAB), random.choice([0, 0, 0, 1])))
        least, sampling = random.choice([0, 30]), random_sampling(random)
        generation = Generation(f"r{number}", prompt, (), num_output, stop_ids, least, sampling, 0)
        at_s = random.uniform(0.1, 2.0)
        world.submit_at(at_s, generation, longest_output(world, num_prompt))
        if not is_calm and random.random() < 0.15:
            world.cancel_at(at_s + random.expovariate(0.5), f"r{number}")
    return world

"""What one seed means: a deployment, a workload and its misfortunes, all drawn from it."""

from __future__ import annotations

from random import Random

from hadal.core.config import Deployment, LimitsConfig, UnitsConfig
from hadal.core.messages import BLOCK_TOKENS, Generation
from hadal.core.plans import Sampling
from tests.sim.engine import VOCAB
from tests.sim.world import Faults, World

RANK_TIMEOUT_S = 1.5


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
        prompt=tuple(random.randrange(VOCAB) for _ in range(min(num_prompt, max_prompt))),
        output=(),
        max_tokens=random.choice([1, 2, random.randint(1, max_output), max_output]),
        stop_ids=tuple(random.sample(range(VOCAB), random.choice([0, 0, 1, 2]))),
        min_tokens=random.choice([0, 0, random.randint(0, 20)]),
        sampling=random_sampling(random),
        attempt=0,
    )


def longest_output(world: World, num_prompt: int) -> int:
    """Tokens a request can have here: the front caps it by the context and by one request's room in
    the units.
    """
    capacity = (min(world.pool_blocks.values()) - 1) * BLOCK_TOKENS
    return min(world.max_context, capacity + 1) - num_prompt


def random_world(seed: int) -> World:
    """A small deployment under pressure: few blocks, few slots, short leases; from calm to much
    going wrong.
    """
    random = Random(f"scenario {seed}")
    blocks = random.randint(4, 10), random.randint(4, 14)
    lease_s = random.choice([0.3, 2.0, 30.0])
    max_waiting = random.choice([1, 4, 64])
    config = Deployment(
        chunk_tokens=random.choice([7, 16, 64, 512]),
        lease_s=lease_s,
        heartbeat_s=0.1,
        unit_timeout_s=1.0 + RANK_TIMEOUT_S,
        rank_timeout_s=RANK_TIMEOUT_S,
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
            Faults(until_s=0.0),
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
            Faults(
                crash_every_s=1.5,
                stuck_share=0.2,
                duplicate_rate=0.05,
                front_restarts=2,
                until_s=6.0,
            ),
        ]
    )
    max_context = random.choice([200, 400, 10_000])
    world = World(seed, config, max_context=max_context, pool_blocks=blocks, faults=faults)
    add_clients(world, random)
    return world


def add_clients(world: World, random: Random) -> None:
    """Requests that fit, over a few seconds, some of which are cancelled."""
    longest = longest_output(world, 0)
    # Short prompts with long answers outgrow the pool after they were let in: that is what
    # preemption is for.
    max_prompt, max_output = random.choice([(longest - 2, 80), (longest - 2, 80), (40, 250)])
    span_s = random.choice([0.1, 3.0])
    for number in range(random.randint(3, 20)):
        request_id = f"r{number}"
        generation = random_generation(random, request_id, max_prompt, max_output)
        at_s = random.uniform(0.1, 0.1 + span_s)
        world.submit_at(at_s, generation, longest_output(world, len(generation.prompt)))
        if random.random() < 0.15:
            world.clock.at(
                at_s + random.expovariate(1.0), lambda name=request_id: world.cancel(name)
            )


def pressured_world(seed: int) -> World:
    """Everybody fits when it comes and nobody when it grows: preemption after preemption, with
    pulls in between.
    """
    random = Random(f"pressure {seed}")
    config = Deployment(
        chunk_tokens=64,
        heartbeat_s=0.1,
        unit_timeout_s=1.0 + RANK_TIMEOUT_S,
        rank_timeout_s=RANK_TIMEOUT_S,
        prefill=UnitsConfig(max_requests=4),
        decode=UnitsConfig(max_requests=8),
        limits=LimitsConfig(max_retries=10_000, request_timeout_s=4000.0),
    )
    blocks = random.randint(7, 12)
    world = World(
        seed,
        config,
        max_context=10_000,
        pool_blocks=(12, blocks),
        faults=Faults(until_s=0.0),
        wire_s=random.choice([0.0, 0.002, 0.05]),
        pull_s=random.choice([0.02, 0.5]),
    )
    for number in range(10):
        num_prompt = random.randint(1, 63)
        generation = Generation(
            f"r{number}",
            tuple(random.randrange(VOCAB) for _ in range(num_prompt)),
            (),
            random.randint(66, 256),
            (),
            0,
            random_sampling(random),
            0,
        )
        world.submit_at(random.uniform(0.1, 1.0), generation, longest_output(world, num_prompt))
        if random.random() < 0.2:
            world.clock.at(random.uniform(0.5, 4.0), lambda name=f"r{number}": world.cancel(name))
    return world


def ranked_world(seed: int) -> World:
    """Units of several ranks, which die, stand still, hang, and lose each other, with few blocks
    and slots each.
    """
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

    config = Deployment(
        chunk_tokens=random.choice([7, 16, 64]),
        lease_s=random.choice([2.0, 30.0]),
        heartbeat_s=0.1,
        unit_timeout_s=2 * RANK_TIMEOUT_S,
        rank_timeout_s=RANK_TIMEOUT_S,
        prefill=units(random.choice([1, 2, 3])),
        decode=units(random.choice([2, 3, 4])),
        limits=LimitsConfig(max_retries=10_000, request_timeout_s=4000.0),
    )
    faults = random.choice(
        [
            Faults(until_s=0.0),
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
    """A decode unit of several ranks with room enough, whose requests differ so much in length that
    no placement lasts; what goes wrong does so while some of them move.
    """
    random = Random(f"uneven {seed}")
    config = Deployment(
        chunk_tokens=2048,
        heartbeat_s=0.05,
        unit_timeout_s=2 * RANK_TIMEOUT_S,
        rank_timeout_s=RANK_TIMEOUT_S,
        prefill=UnitsConfig(max_requests=16),
        decode=UnitsConfig(
            ranks=random.choice([3, 4]), max_requests=8, request_balance=request_balance
        ),
        limits=LimitsConfig(max_retries=10_000, request_timeout_s=4000.0),
    )
    faults = random.choice(
        [
            Faults(until_s=0.0),
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
        faults=Faults(until_s=0.0) if is_calm else faults,
        wire_s=random.choice([0.0005, 0.002]),
        pull_s=random.choice([0.005, 0.02, 0.1]),
    )
    for number in range(30):
        num_prompt, num_output = random.choice(
            [(30, 40), (60, 300), (500, 120), (random.randint(1, 1200), 200)]
        )
        generation = Generation(
            f"r{number}",
            tuple(random.randrange(VOCAB) for _ in range(num_prompt)),
            (),
            num_output,
            tuple(random.sample(range(VOCAB), random.choice([0, 0, 0, 1]))),
            random.choice([0, 30]),
            random_sampling(random),
            0,
        )
        at_s = random.uniform(0.1, 2.0)
        world.submit_at(at_s, generation, longest_output(world, num_prompt))
        if not is_calm and random.random() < 0.15:
            world.clock.at(
                at_s + random.expovariate(0.5), lambda name=f"r{number}": world.cancel(name)
            )
    return world

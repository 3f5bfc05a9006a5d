"""Worlds with chats of several turns: two tenants, shared system prompts, and too few blocks."""

from __future__ import annotations

from random import Random

import msgspec

from hadal.core.config import CacheConfig, UnitsConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from tests.sim.disk import DiskFaults
from tests.sim.engine import expected_output
from tests.sim.scenario import deployment, random_sampling, words
from tests.sim.world import CALM, RESTARTED, Faults, World

MEMORY = CacheConfig()
DISK = CacheConfig("off", "folder")
BOTH = CacheConfig("auto", "folder")
OFF = CacheConfig("off")


def chats_world(
    seed: int,
    cache: CacheConfig | None = None,
    *,
    ranks: int | None = None,
    disk_faults: DiskFaults | None = None,
    is_calm: bool = False,
) -> World:
    """Return a world of chats, drawn from the seed except for the given parameters."""
    random = Random(f"chats {seed}")
    drawn_ranks = random.choice([1, 1, 2, 3])
    ranks = drawn_ranks if ranks is None else ranks
    config = deployment(
        chunk_tokens=random.choice([16, 64, 200]),
        lease_s=random.choice([2.0, 30.0]),
        prefill=UnitsConfig(
            units=random.choice([1, 1, 2]),
            ranks=ranks,
            max_requests=random.randint(1, 6),
            overlap=random.choice(["auto", "prefill_dual"]),
            min_split_tokens=random.choice([2, 32]),
            request_balance=random.choice(["auto", "auto", "off", "turns"]),
        ),
        decode=UnitsConfig(
            units=random.choice([1, 2]),
            ranks=random.choice([1, 1, 2]),
            max_requests=random.randint(2, 6),
        ),
        cache=cache or random.choice([MEMORY, DISK, BOTH, BOTH]),
    )
    faults = random.choice(
        [
            CALM,
            CALM,
            Faults(duplicate_rate=0.05, engine_rate=0.01, until_s=0.0),
            Faults(crash_every_s=1.0, until_s=6.0),
            Faults(crash_every_s=0.7, stuck_share=0.3, engine_rate=0.005, until_s=6.0),
            RESTARTED,
        ]
    )
    drawn_faults = random.choice(
        [
            DiskFaults(),
            DiskFaults(slow_rate=0.2, slow_s=12.0),
            DiskFaults(
                load_rate=0.1, damage_rate=0.1, drop_rate=0.3, store_rate=0.1, slow_rate=0.05
            ),
            DiskFaults(load_rate=0.5, store_rate=0.5),
        ]
    )
    num_blocks = random.choice([9, 12, 20, 60])
    world = World(
        seed,
        config,
        max_context=(num_blocks - 1) * BLOCK_TOKENS,
        pool_blocks=(num_blocks, random.choice([12, 40])),
        faults=CALM if is_calm else faults,
        wire_s=random.choice([0.0005, 0.002]),
        disk_blocks=random.choice([6, 40, 1000]),
        disk_faults=drawn_faults if disk_faults is None else disk_faults,
    )
    add_chats(world, random)
    return world


def add_chats(world: World, random: Random) -> None:
    """Add chats with known answers: each prompt is the conversation so far and some new tokens."""
    room = (min(world.pool_blocks.values()) - 1) * BLOCK_TOKENS
    longest = min(world.max_context, room + 1)
    systems = [words(random, random.choice([20, 64, 130, 200])) for _ in range(2)]
    for chat in range(random.randint(2, 7)):
        salt = random.choice([b"alice", b"bob"])
        system = random.choice(systems)
        num_public = random.choice([0, len(system)])
        text, at_s = system, random.uniform(0.1, 3.0)
        for turn in range(random.randint(1, 4)):
            text += words(random, random.choice([1, 10, 64, 100]))
            if len(text) + 2 > longest:
                break
            most, sampling = random.choice([1, 5, 30, 90]), random_sampling(random)
            of = {"salt": salt, "num_public": num_public}
            generation = Generation(f"c{chat}t{turn}", text, (), most, (), 0, sampling, 0, **of)
            world.submit_at(at_s, generation, longest - len(text))
            # The same prompt again, cut to whole blocks.
            if len(text) >= BLOCK_TOKENS and random.random() < 0.2:
                num_tokens = len(text) // BLOCK_TOKENS * BLOCK_TOKENS
                again = msgspec.structs.replace(
                    generation, request_id=f"{generation.request_id}b", prompt=text[:num_tokens]
                )
                world.submit_at(at_s + random.choice([0.01, 1.0]), again, longest - num_tokens)
            if random.random() < 0.1:
                world.cancel_at(at_s + random.expovariate(2.0), generation.request_id)
            text += tuple(expected_output(generation))
            at_s += random.choice([0.05, 0.5, 2.0])


def failing_world(seed: int) -> World:
    """Return a world of three prefill ranks: some steps fail while prompts wait for blocks."""
    random = Random(f"failing {seed}")
    config = deployment(
        chunk_tokens=16,
        prefill=UnitsConfig(ranks=3, max_requests=2, request_balance="off"),
        decode=UnitsConfig(ranks=2, max_requests=4),
        cache=DISK,
    )
    world = World(
        seed,
        config,
        max_context=11 * BLOCK_TOKENS,
        pool_blocks=(9, 40),
        faults=Faults(engine_rate=0.05, until_s=0.0),
        disk_blocks=1000,
    )
    for chat in range(16):
        if chat % 8 == 0:
            system = words(random, 200)
        text, at_s = system, random.uniform(0.1, 3.0)
        for turn in range(4):
            text += words(random, 40)
            generation = Generation(
                f"c{chat}t{turn}", text, (), 2, (), 0, random_sampling(random), 0, salt=b"alice"
            )
            world.submit_at(at_s, generation, world.max_context - len(text))
            text += tuple(expected_output(generation))
            at_s += 0.7
    return world

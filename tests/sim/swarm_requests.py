"""Arrivals of requests in a swarm world, and clients that leave."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.core.plans import Sampling
from tests.sim.chats import add_chats
from tests.sim.engine import VOCAB
from tests.sim.scenario import longest_output, random_generation, random_sampling, words
from tests.sim.swarm_scene import LONGEST_PROMPT, Scene

if TYPE_CHECKING:
    from tests.sim.swarm_world import SwarmWorld


def add_requests(world: SwarmWorld, scene: Scene, random: Random) -> None:
    """Add all requests of a scene, and its shutdown."""
    on = scene.on
    if on & {"uneven", "tight"}:
        _add_pressure(world, on, random)
    elif "chats" in on:
        add_chats(world, random)
    else:
        span_s = 0.1 if "rush" in on else random.choice([1.0, 4.0])
        # Short prompts with long answers outgrow the blocks that they were admitted with.
        is_crowd = "crowd" in on
        room = min(longest_output(world, 0) - 2, 100 if is_crowd else LONGEST_PROMPT)
        for number in range(random.randint(10, 20) if is_crowd else random.randint(3, 14)):
            num_output = random.choice([200, 300] if is_crowd else [40, 120])
            generation = random_generation(random, f"r{number}", room, num_output)
            at_s = random.uniform(0.1, 0.1 + span_s) + random.choice([0.0, 0.0, 4.0])
            world.submit_at(at_s, generation, longest_output(world, len(generation.prompt)))
            if random.random() < 0.3:
                world.cancel_at(at_s + random.expovariate(1.0), f"r{number}")
    if "hasty" in on:
        for name, at_s in list(world.submitted_s.items()):
            if random.random() < 0.3:
                world.cancel_at(at_s + random.uniform(0, 0.2), name)
    if "too long" in on:
        for number in range(random.randint(1, 3)):
            num_prompt = random.choice(
                [longest_output(world, 0), world.max_context, world.max_context + 7]
            )
            prompt = words(random, num_prompt)
            world.too_long.add(f"x{number}")
            generation = Generation(f"x{number}", prompt, (), 9, (), 0, Sampling(), 0)
            world.submit_at(random.uniform(0.1, 4.0), generation, 0)
    if scene.troubles.shutdown_s is not None:
        world.clock.at(scene.troubles.shutdown_s, world.shut_down)


def _add_pressure(world: SwarmWorld, on: frozenset[str], random: Random) -> None:
    """Add requests that run beside each other on every rank.

    "uneven": lengths differ so much that requests must move. "tight": they outgrow the pool.
    """
    most = longest_output(world, 0) - 2
    span_s = random.choice([0.4, 1.0])
    for number in range(random.randint(12, 16)):
        kinds = []
        if "uneven" in on:
            kinds += [(20, 40), (20, 80), (BLOCK_TOKENS - 1, 180), (random.randint(200, 900), 120)]
        if "tight" in on:
            kinds += [(random.randint(1, BLOCK_TOKENS - 1), random.randint(100, 250))]
        num_prompt, num_output = random.choice(kinds)
        prompt = words(random, min(num_prompt, most))
        stop_ids = tuple(random.sample(range(VOCAB), random.choice([0, 0, 0, 1])))
        least, sampling = random.choice([0, 40]), random_sampling(random)
        generation = Generation(f"r{number}", prompt, (), num_output, stop_ids, least, sampling, 0)
        at_s = random.uniform(0.1, span_s)
        world.submit_at(at_s, generation, longest_output(world, len(generation.prompt)))
        if random.random() < 0.2:
            world.cancel_at(at_s + random.expovariate(0.7), f"r{number}")

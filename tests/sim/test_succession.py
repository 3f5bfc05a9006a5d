"""Leaders die at any moment while their ranks live: a successor continues with their KV.

Clients check every token, and each step reads the pool itself: wrong KV shows.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from hadal.core.cache import num_names
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.units import Cached, Resume
from tests.fresh import fresh, seeds
from tests.levels import FULL, NUM_SEEDS
from tests.sim.chats import MEMORY, chats_world
from tests.sim.scenario import ranked_world, uneven_world
from tests.sim.test_world import LIMIT_S
from tests.sim.world import World


def some_seeds(num: int) -> list[int]:
    """Return fixed seeds (0 to 11 at full sizes, else `num` from 2 on), and fresh ones."""
    fixed = range(12) if FULL else range(2, 2 + num)
    return [*fixed, *(fresh().randrange(2**40) for _ in range(NUM_SEEDS))]


class Watched:
    """World in which leaders die, with counts of what their successors take over."""

    def __init__(self, world: World, seed: int, num_deaths: int, leaders: list[str]) -> None:
        world.faults = replace(world.faults, succession_share=1.0)
        random = Random(f"succession {seed}")
        for _ in range(num_deaths):
            name = random.choice(leaders)
            world.clock.at(random.uniform(0.5, 5.0), lambda name=name: world.kill_unit(name))
        world.quiet_from_s = max(world.quiet_from_s, 6.0)
        self.world = world
        self.num_resumed = 0
        self.num_found = 0
        """Number of block names that successors took over: those in a leader's first report to a front."""

    def run(self) -> None:
        self.world.run(0.2)
        host = self.world.hosts["front"]
        send = host._send

        def watching(to: str, message: AnyMessage) -> None:
            self.num_resumed += len(message.generations) if isinstance(message, Resume) else 0
            send(to, message)

        host._send = watching
        verify = self.world._verify_named

        def verifying(name: str, message: Cached) -> None:
            self.num_found += num_names(message.added) * message.is_whole
            verify(name, message)

        self.world._verify_named = verifying
        self.world.run_to_the_end(LIMIT_S)
        errors = {
            client.final.error for client in self.world.clients.values() if client.final is not None
        }
        assert errors <= {None, "cancelled: the client went away"}


@pytest.mark.promise(
    "another leader on another node of the unit takes the ranks over, with weights and KV"
)
@pytest.mark.campaign("more seeds")
@pytest.mark.slow("seven worlds at `more`")
def test_what_decodes_goes_on_with_the_kv_that_its_ranks_hold() -> None:
    """Nearly all streams continue; requests that were moving between ranks or units are retried."""
    num_resumed = num_retries = 0
    for seed in some_seeds(2):
        watched = Watched(uneven_world(seed, is_calm=True), seed, 3, ["decode-0"])
        watched.run()
        num_resumed += watched.num_resumed
        num_retries += watched.world.front.totals.retries
    assert num_resumed > 5 * num_retries


@pytest.mark.campaign("more seeds")
def test_what_is_named_in_prefill_is_found_by_the_next_leader() -> None:
    """The world compares each reported name with its block's content, and each token when it arrives."""
    num_found = 0
    for seed in some_seeds(3):
        watched = Watched(chats_world(seed, MEMORY, ranks=2, is_calm=True), seed, 3, ["prefill-0"])
        watched.run()
        num_found += watched.num_found
    assert num_found > 50


@pytest.mark.parametrize("seed", seeds(1, 5, 12))
def test_chats_whose_leaders_die_among_all_else_that_goes_wrong(seed: int) -> None:
    Watched(chats_world(seed, ranks=3), seed, 6, ["prefill-0"]).run()


@pytest.mark.parametrize("seed", seeds(1, 5, 12))
def test_leaders_die_among_all_else_that_goes_wrong(seed: int) -> None:
    world = ranked_world(seed)
    leaders = [
        name for name in ("decode-0", "prefill-0") if getattr(world.config, name[:-2]).ranks > 1
    ]
    Watched(world, seed, 8, leaders).run()

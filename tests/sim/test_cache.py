"""Random worlds for the cache: turns of chats find KV that was computed before, and none of other tenants.

Tokens and named blocks are checked, and at the end no block is owned. HADAL_SEEDS=N: N fresh seeds.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import pytest

from hadal.core import cache
from hadal.core.config import CacheConfig, UnitsConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.plans import Sampling
from hadal.roles.prefill.leader import PrefillLeader
from tests.fresh import seeds
from tests.levels import FULL
from tests.sim.chats import BOTH, DISK, MEMORY, OFF, chats_world, failing_world
from tests.sim.disk import DiskFaults
from tests.sim.engine import expected_output
from tests.sim.scenario import deployment, words
from tests.sim.test_world import run_seed
from tests.sim.world import World, inner_of

NUM_CALM = 8 if FULL else 2
"""Worlds per kind of cache."""
NUM_BAD = 12 if FULL else 3
"""Worlds with a bad disk."""


def counts_of(worlds: list[World]) -> Counter[str]:
    """Return the summed counters of the prefill units that live at the end."""
    counts: Counter[str] = Counter()
    for world in worlds:
        for host in world.hosts.values():
            inner = inner_of(host)
            if isinstance(inner, PrefillLeader):
                counts.update(inner.cache.totals())
    return counts


@pytest.mark.slow("some fresh seeds make large worlds")
@pytest.mark.parametrize("seed", seeds(3, 10, 1_000))
def test_turns_find_what_is_theirs(seed: int) -> None:
    run_seed(seed, chats_world)


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(3, marks=pytest.mark.more("units of many ranks"))]
)
@pytest.mark.slow("six worlds of chats")
def test_each_kind_of_cache_is_hit_and_all_of_them_say_the_same(ranks: int) -> None:
    """Each world checks its tokens; this test checks that there were cache hits."""

    def run(config: CacheConfig) -> Counter[str]:
        make = partial(
            chats_world, cache=config, ranks=ranks, disk_faults=DiskFaults(), is_calm=True
        )
        make.__name__ = "calm chats_world"  # type: ignore[attr-defined]
        return counts_of([run_seed(seed, make) for seed in range(NUM_CALM)])

    memory, disk, both, off = (run(config) for config in (MEMORY, DISK, BOTH, OFF))
    assert not any(count for name, count in off.items() if name != cache.MISS_TOKENS)
    assert (
        min(
            memory[cache.MEMORY_HIT_TOKENS],
            disk[cache.DISK_HIT_TOKENS],
            both[cache.MEMORY_HIT_TOKENS],
        )
        > 1000
    )
    assert (memory[cache.DISK_HIT_TOKENS], disk[cache.MEMORY_HIT_TOKENS]) == (0, 0)
    assert (
        min(both[cache.DISK_HIT_TOKENS], memory[cache.MISS_TOKENS], memory[cache.EVICTED_BLOCKS])
        > 0
    )
    assert disk[cache.STORED_BLOCKS] > 0


class AgentWorld(World):
    """One chat of many turns: each prompt is the conversation so far, and a tool's answer."""

    def __init__(self, prefill_ranks: int, decode_ranks: int, cache: CacheConfig) -> None:
        config = deployment(
            prefill=UnitsConfig(ranks=prefill_ranks),
            decode=UnitsConfig(ranks=decode_ranks),
            cache=cache,
        )
        super().__init__(1, config, max_context=4000, pool_blocks=(60, 60), disk_blocks=1000)
        random = Random("an agent")
        self.found: dict[str, int] = {}
        """Request -> tokens of its prompt that were found in the cache."""
        self.expected: dict[str, int] = {}
        """Request -> tokens of its prompt in full blocks that were computed before."""
        text, num_there = words(random, 30), 0
        for turn in range(NUM_AGENT_TURNS):
            name = f"t{turn}"
            self.expected[name] = min(num_there, len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            asked = Generation(name, text, (), 99, (5,), 40, Sampling(), 0, salt=b"s")
            self.submit_at(3.0 + 4.0 * turn, asked, 4000)
            text += tuple(expected_output(asked))
            num_there = len(text) - 1  # The last token drawn has no KV.
            text += words(random, random.choice([1, 20, 64, 90]))

    def _deliver(self, effect: Deliver) -> None:
        super()._deliver(effect)
        self.found[effect.request_id] = self.found.get(effect.request_id, 0) + effect.num_cached


NUM_AGENT_TURNS = 10


@pytest.mark.promise("Each full block of prompt and answer is therefore found")
@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks"),
    [(2, 3), pytest.param(1, 1, marks=pytest.mark.more("several ranks are one case"))],
)
def test_an_agent_finds_all_full_blocks_of_what_was_said(
    prefill_ranks: int, decode_ranks: int
) -> None:
    world = AgentWorld(prefill_ranks, decode_ranks, MEMORY)
    world.run_to_the_end(100.0)
    assert world.found == world.expected
    assert sum(world.found.values()) > 64 * NUM_AGENT_TURNS
    world = AgentWorld(prefill_ranks, decode_ranks, OFF)
    world.run_to_the_end(100.0)
    assert set(world.found.values()) == {0}


@pytest.mark.promise("a full, slow or failing disk costs cached blocks, but no time")
@pytest.mark.slow("worlds of chats with disks that fail")
def test_a_bad_disk_is_counted_and_breaks_nothing() -> None:
    faults = DiskFaults(load_rate=0.2, damage_rate=0.2, store_rate=0.2, drop_rate=0.2)
    make = partial(chats_world, cache=DISK, disk_faults=faults, is_calm=True)
    make.__name__ = "bad disk"  # type: ignore[attr-defined]
    counts = counts_of([run_seed(seed, make) for seed in range(NUM_BAD)])
    assert (
        min(
            counts[cache.DAMAGED_BLOCKS],
            counts[cache.SKIPPED_BLOCKS],
            counts[cache.DISK_HIT_TOKENS],
        )
        > 0
    )


@pytest.mark.parametrize("seed", seeds(1, 2))
@pytest.mark.slow("a world of chats with ranks that die")
def test_nothing_is_read_into_blocks_of_a_step_that_failed_before_all_ranks_broke_it_off(
    seed: int,
) -> None:
    run_seed(seed, failing_world)


def test_the_same_seed_is_the_same_run() -> None:
    one, other = (run_seed(7, chats_world) for _ in range(2))
    assert (one.clock.now(), counts_of([one])) == (other.clock.now(), counts_of([other]))

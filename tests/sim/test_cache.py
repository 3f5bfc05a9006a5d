"""Seeds against the cache: turns of chats find what was computed before, and nothing of others.

Tokens and named blocks are checked, and at the end nothing is held. HADAL_SEEDS=N runs N fresh seeds.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from hadal.core import cache
from hadal.core.config import CacheConfig
from hadal.roles.prefill.leader import PrefillLeader
from tests.fresh import seeds
from tests.levels import FULL
from tests.sim.chats import BOTH, DISK, MEMORY, OFF, chats_world, failing_world
from tests.sim.disk import DiskFaults
from tests.sim.test_world import run_seed
from tests.sim.world import World, inner_of

NUM_CALM = 8 if FULL else 2
"""Worlds for each kind of cache."""
NUM_BAD = 12 if FULL else 3
"""Worlds with a bad disk."""


def counts_of(worlds: list[World]) -> Counter[str]:
    """What the prefill units that live at the end have counted."""
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
    """The tokens are checked in each; here, that there was something to find."""

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


@pytest.mark.promise("a disk that is full, slow or failing loses blocks, not time")
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

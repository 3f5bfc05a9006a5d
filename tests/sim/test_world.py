"""Random worlds for the roles: every stream ends once with exactly its tokens; no leak, no hang.

HADAL_SEEDS=N runs N fresh seeds. A failure names its seed; `run_seed(seed)` repeats it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fresh import fresh, seeds
from tests.levels import FULL, MORE, NUM_SEEDS
from tests.sim.scenario import pressured_world, random_world, ranked_world
from tests.sim.world import World

LIMIT_S = 3000.0
NUM_PRESSURED = 6 if FULL else 4 if MORE else 2


def run_seed(seed: int, make_world: Callable[[int], World] = random_world) -> World:
    """Run one seed to its end. An error names the seed."""
    world = make_world(seed)
    try:
        world.run_to_the_end(LIMIT_S)
        for name, client in world.clients.items():
            assert client.is_lost or client.final is not None, f"{name} never ended"
            error = client.final.error if client.final is not None else None
            assert error is None or client.final.error_status == 499, f"{name} failed: {error}"
    except Exception as error:
        error.add_note(
            f"{make_world.__name__}({seed}) at {world.clock.now():.3f} s, {world.faults},"
            f" {world.config}"
        )
        raise
    return world


@pytest.mark.parametrize("seed", seeds(6, 10, 40))
def test_every_stream_ends_with_its_tokens(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("seed", seeds(4, 6, 24))
def test_ranks_come_and_go(seed: int) -> None:
    run_seed(seed, ranked_world)


@pytest.mark.promise("admission, and preemption that loses no token")
@pytest.mark.campaign("more seeds")
@pytest.mark.slow("worlds in which most requests are preempted")
def test_preemption_loses_nothing() -> None:
    new = [fresh().randrange(2**40) for _ in range(NUM_SEEDS)]
    worlds = [run_seed(seed, pressured_world) for seed in [*range(NUM_PRESSURED), *new]]
    assert sum(world.num_returned["preempted"] for world in worlds) > len(worlds)


@pytest.mark.parametrize("make_world", [random_world, ranked_world])
def test_the_same_seed_is_the_same_run(make_world: Callable[[int], World]) -> None:
    runs = [run_seed(4, make_world) for _ in range(2)]
    assert runs[0].clock.now() == runs[1].clock.now()
    assert [f.totals for f in runs[0].fronts] == [f.totals for f in runs[1].fronts]

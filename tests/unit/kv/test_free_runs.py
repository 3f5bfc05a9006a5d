"""Test FreeRuns against a plain set at random: shortest fitting run, merging of adjacent runs."""

from __future__ import annotations

from random import Random

import pytest

from hadal.kv.free_runs import FreeRuns
from tests.fresh import fresh


def test_the_shortest_run_that_fits_is_taken() -> None:
    runs = FreeRuns()
    for first, count in ((0, 8), (10, 3), (20, 5)):
        runs.add(first, count)
    assert runs.take(3) == (10, 3)
    assert runs.take(4) == (20, 4)
    assert runs.take(9) == (0, 8)
    assert (runs.take(9), len(runs), runs.take(1), runs.take(0)) == ((24, 1), 0, None, None)


def test_runs_that_touch_become_one() -> None:
    runs = FreeRuns()
    runs.add(0, 2)
    runs.add(4, 2)
    runs.add(2, 2)
    assert list(runs) == [(0, 6)]
    assert runs.check() == []


def test_removed_runs_are_not_taken() -> None:
    runs = FreeRuns()
    runs.add(0, 2)
    runs.add(100, 2)
    runs.remove(lambda first: first >= 100)
    assert (len(runs), runs.take(3), runs.take(1), runs.check()) == (2, (0, 2), None, [])


def test_check_sees_a_wrong_count() -> None:
    runs = FreeRuns()
    runs.add(0, 2)
    runs._num += 1
    assert runs.check()


@pytest.mark.parametrize("seed", [1, 2, fresh().getrandbits(32)])
def test_any_use_adds_up(seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    runs, free, held = FreeRuns(), set(range(40)), set[int]()
    runs.add(0, 40)
    for _ in range(800):
        if random.random() < 0.5:
            count = random.randrange(1, 9)
            taken = runs.take(count)
            assert (taken is None) == (not free)
            if taken is not None:
                slots = set(range(taken[0], taken[0] + taken[1]))
                assert slots <= free
                assert 0 < len(slots) <= count
                free -= slots
                held |= slots
        for slot in [slot for slot in sorted(held) if random.random() < 0.2]:
            runs.add(slot)
            held.discard(slot)
            free.add(slot)
        assert (len(runs), runs.check()) == (len(free), [])

"""Test runs: neighbours in every row form one piece, and nothing is left out or taken twice."""

from __future__ import annotations

from random import Random

import pytest

from hadal.kv.runs import runs
from tests.fresh import fresh


def test_neighbours_in_all_rows_are_one_run() -> None:
    assert list(runs([])) == []
    assert list(runs([7])) == [(0, 1)]
    assert list(runs([1, 2, 3, 9, 8, 9])) == [(0, 3), (3, 1), (4, 2)]
    assert list(runs([1, 2, 3, 4], [5, 6, 8, 9])) == [(0, 2), (2, 2)]
    with pytest.raises(ValueError, match="need equal lengths"):
        list(runs([1, 2], [1]))


@pytest.mark.parametrize("seed", [0, 1, fresh().getrandbits(32)])
def test_runs_cover_the_rows_and_are_as_long_as_can_be(seed: int) -> None:
    random = Random(seed)
    rows = [[random.randrange(4) for _ in range(300)] for _ in range(random.choice([1, 2]))]
    found = list(runs(*rows))
    seen = [index for first, count in found for index in range(first, first + count)]
    assert seen == list(range(300))
    cuts = {first for first, _ in found}
    for index in range(1, 300):
        assert (index not in cuts) == all(row[index] == row[index - 1] + 1 for row in rows), seed

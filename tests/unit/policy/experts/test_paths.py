"""Paths between placements: distances count missing replicas; a budget buys the best tables."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.arrays import Ints
from hadal.core.placement import EMPTY
from hadal.policy.experts.paths import Path, choose, standing
from hadal.policy.experts.tables import held_by, num_moved
from tests.fresh import fresh


def table_of(
    random: np.random.Generator,
    num_layers: int,
    num_ranks: int,
    num_expert_slots: int,
    num_experts: int,
) -> Ints:
    """Draw a table in which no rank has an expert twice and some slots are empty."""
    rows = [
        random.permutation(num_experts)[:num_expert_slots] for _ in range(num_layers * num_ranks)
    ]
    table = np.stack(rows).reshape(num_layers, num_ranks, num_expert_slots)
    return np.where(random.random(table.shape) < 0.2, EMPTY, table)


@pytest.mark.parametrize("seed", [0, 1, fresh().randrange(2**31)])
def test_what_moved_is_what_the_rank_did_not_hold(seed: int) -> None:
    random = np.random.default_rng(seed)
    old, new = (table_of(random, 3, 5, 4, 9) for _ in range(2))
    expected = (held_by(new, 9) & ~held_by(old, 9)).sum(axis=(1, 2))
    assert expected.any()
    assert num_moved(old, new).tolist() == expected.tolist()
    assert not num_moved(old, np.flip(old, axis=2)).any()


def test_the_budget_goes_to_the_layer_that_gains_most_by_it() -> None:
    """Choose between two layers of one move each: from a top load of 2 to 1, or from 2 to 1.5."""
    tables = np.arange(4, dtype=np.int16).reshape(2, 2, 1)
    path = Path(tables, np.array([[2, 2], [1, 1.5]], np.float32), np.array([[0, 0], [3, 3]]))
    assert choose([path], 2).tolist() == [[0], [1]]
    assert choose([path], 3).tolist() == [[2], [1]]
    assert choose([path], 6).tolist() == [[2], [3]]


def test_a_heavier_table_is_never_bought() -> None:
    loads = np.array([[3.0, 1.0, 1.0, 1.0]])
    even = np.array([[[0, EMPTY], [1, 2], [3, EMPTY]]])
    odd = np.array([[[0, 1], [2, EMPTY], [3, EMPTY]]])
    paths = [standing(even, loads, np.array([0])), standing(odd, loads, num_moved(even, odd))]
    assert choose(paths, 9).reshape(even.shape).tolist() == even.tolist()

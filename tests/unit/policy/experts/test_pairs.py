"""Two expert slots per rank: never worse than greedy; plans beat single moves within a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.policy.experts.balance import Cluster, balance, balancedness
from hadal.policy.experts.greedy import expand, fold, replicate
from hadal.policy.experts.increment import Homes, descend
from hadal.policy.experts.pair_counts import choose_counts, heaviest_pair
from hadal.policy.experts.paths import choose
from hadal.policy.experts.tables import held_by


def lognormal(seed: int, num_layers: int, num_experts: int, sigma: float) -> np.ndarray:
    return np.exp(sigma * np.random.default_rng(seed).standard_normal((num_layers, num_experts)))


@given(
    st.integers(0, 2**31),
    st.sampled_from([(16, 10), (20, 12), (8, 7)]),
    st.sampled_from([0.3, 0.7, 1.5]),
)
def test_counts_never_worse_than_the_greedys(
    seed: int, sizes: tuple[int, int], sigma: float
) -> None:
    num_experts, num_ranks = sizes
    loads = lognormal(seed, 4, num_experts, sigma)
    greedy, _ = replicate(loads, 2 * num_ranks, num_ranks)
    chosen = choose_counts(loads, 2 * num_ranks, num_ranks, num_rounds=4)
    assert (chosen.sum(axis=1) == 2 * num_ranks).all()
    assert (chosen >= 1).all()
    assert (chosen <= num_ranks).all()
    single = loads.astype(np.float32)
    assert (heaviest_pair(single, chosen) <= heaviest_pair(single, greedy) * (1 + 1e-5)).all()


def test_fold_pairs_the_heaviest_with_the_lightest() -> None:
    loads = np.array([[8.0, 1.0, 2.0, 3.0]])
    experts, shares = expand(loads, np.array([[1, 1, 1, 1]]))
    assert shares.tolist() == [[8.0, 3.0, 2.0, 1.0]]
    assert fold(experts).tolist() == [[[0, 1], [3, 2]]]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_passing_replicas_on_gets_past_single_moves(seed: int) -> None:
    cluster = Cluster.even(36, 1, 2)
    loads = lognormal(seed, 8, 64, 0.65)
    today = balance(loads, cluster).placement
    drifted = loads * lognormal(seed + 10, 8, 64, 0.25)
    drifted *= 36 / drifted.sum(axis=1, keepdims=True)
    max_moves = 8 * 72 // 4
    plan = balance(drifted, cluster, current=today, max_moves=max_moves, target=1.0)
    table = today.slot_to_expert_LRS.astype(np.int64)
    path = descend(
        table, Homes(held_by(table, 64)), drifted, np.ones(8), np.full(36, 2), max_moves=max_moves
    )
    single = choose([path], max_moves).reshape(table.shape)
    assert plan.placement.check() == []
    assert plan.moved_replicas <= max_moves
    before = balancedness(today, drifted)
    alone = balancedness(type(today)(64, single.astype(np.int16)), drifted)
    assert (plan.balancedness_L >= before - 1e-6).all()
    assert plan.balancedness_L.mean() > alone.mean() > before.mean()

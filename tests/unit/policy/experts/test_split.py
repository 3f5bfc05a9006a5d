"""Weighted splits: fractions sum to one, are levelled where possible, and never heavier than even."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.placement import EMPTY
from hadal.policy.experts.balance import Cluster, balance, balancedness, rank_loads


@given(
    st.integers(0, 2**31),
    st.sampled_from([(8, (3, 3, 3)), (12, (4, 4, 0, 3, 4)), (6, (2, 2, 2, 2))]),
)
def test_fractions(seed: int, sizes: tuple[int, tuple[int, ...]]) -> None:
    num_experts, slots = sizes
    cluster = Cluster(slots, (0,) * len(slots))
    random = np.random.default_rng(seed)
    loads = np.exp(random.standard_normal((3, num_experts)))
    today = balance(loads, cluster).placement
    other = loads * np.exp(0.5 * random.standard_normal(loads.shape))
    plan = balance(other, cluster, current=today, max_moves=0, weighted=True)
    assert plan.moved_replicas == 0
    split, table = plan.split_LRS, plan.placement.slot_to_expert_LRS
    assert split is not None
    assert (split >= -1e-12).all()
    assert not split[table == EMPTY].any()
    for layer in range(3):
        sums = np.bincount(
            table[layer][table[layer] >= 0], split[layer][table[layer] >= 0], num_experts
        )
        assert np.allclose(sums, 1.0)
    assert (plan.balancedness_L >= balancedness(today, other, None, cluster) - 1e-6).all()
    assert np.allclose(rank_loads(plan.placement, other, split).sum(axis=1), other.sum(axis=1))


def test_levels_two_ranks_that_share_an_expert() -> None:
    cluster = Cluster.even(2, 1, 2)
    plan = balance(np.array([[6.0, 3.0, 1.0]]), cluster, weighted=True)
    assert plan.balancedness_L[0] == pytest.approx(1.0)

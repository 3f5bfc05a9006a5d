"""Expert placements: valid for all loads, never worse than greedy, near bounds on real loads."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.placement import EMPTY, Placement
from hadal.policy.experts.balance import Cluster, balance, balancedness, moved_replicas, rank_loads
from tests.needs import shared_data


def lognormal(seed: int, num_layers: int, num_experts: int, sigma: float = 0.65) -> np.ndarray:
    """Draw loads like DeepSeek-V3's measured ones: the heaviest experts have about 10x the mean."""
    loads = np.exp(sigma * np.random.default_rng(seed).standard_normal((num_layers, num_experts)))
    return np.minimum(loads, 10 * loads.mean(axis=1, keepdims=True))


def measured(name: str) -> np.ndarray:
    packed = shared_data(f"expert_loads/{name}.json.gz").read_bytes()
    loads = np.array(json.loads(gzip.decompress(packed))["tokens_per_expert"], np.float64)
    return loads[loads.sum(axis=1) > 0]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    """Draw (cluster with uneven and dead ranks, number of experts, seed of the loads)."""
    num_experts = draw(st.integers(1, 24))
    slots = draw(st.lists(st.integers(0, num_experts), min_size=1, max_size=9))
    if sum(slots) < num_experts:
        slots.append(num_experts)
    return Cluster(tuple(slots), (0,) * len(slots)), num_experts, draw(st.integers(0, 2**31))


def check(placement: Placement, cluster: Cluster) -> None:
    assert placement.check() == []
    held = (placement.slot_to_expert_LRS != EMPTY).sum(axis=2)
    assert (held <= np.array(cluster.expert_slots)).all()


@given(clusters(), st.sampled_from([0.0, 0.7, 2.5]))
def test_sound_and_never_worse_than_greedy(case: tuple[Cluster, int, int], sigma: float) -> None:
    cluster, num_experts, seed = case
    loads = lognormal(seed, 3, num_experts, sigma)
    fast, best = balance(loads, cluster, mode="fast"), balance(loads, cluster)
    again = balance(loads, cluster)
    for plan in (fast, best):
        check(plan.placement, cluster)
    assert (best.balancedness_L >= fast.balancedness_L - 1e-6).all()
    assert best.placement.to_bytes() == again.placement.to_bytes()
    assert np.allclose(rank_loads(best.placement, loads).sum(axis=1), loads.sum(axis=1))


@given(
    st.integers(0, 2**31),
    st.sampled_from([(8, 2, 2, 4), (8, 4, 2, 3), (12, 3, 3, 2), (4, 2, 4, 2)]),
)
def test_hierarchical_keeps_groups_on_a_node(seed: int, sizes: tuple[int, int, int, int]) -> None:
    num_groups, num_nodes, ranks_a_node, group_size = sizes
    num_experts = num_groups * group_size
    num_expert_slots = -(-num_experts // (num_nodes * ranks_a_node)) + 1
    cluster = Cluster.even(num_nodes * ranks_a_node, num_nodes, num_expert_slots)
    loads = lognormal(seed, 3, num_experts)
    plan = balance(loads, cluster, mode="hierarchical", num_groups=num_groups)
    check(plan.placement, cluster)
    by_node = plan.placement.slot_to_expert_LRS.reshape(3, num_nodes, -1) // group_size
    for layer in by_node:
        groups = [set(node[node >= 0].tolist()) for node in layer]
        assert sum(map(len, groups)) == num_groups, "a group is on two nodes"
    hybrid = balance(loads, cluster, mode="hybrid", num_groups=num_groups)
    check(hybrid.placement, cluster)
    assert (hybrid.balancedness_L >= plan.balancedness_L - 1e-6).all()


@pytest.mark.promise(
    "A new split of tokens over the existing replicas moves nothing; a new placement "
    "moves few replicas."
)
@given(
    st.integers(0, 2**31), st.integers(0, 12), st.sampled_from([(16, 6, 4), (12, 9, 2), (20, 4, 6)])
)
def test_a_plan_near_todays_keeps_its_budget(
    seed: int, max_moves: int, sizes: tuple[int, int, int]
) -> None:
    num_experts, num_ranks, num_expert_slots = sizes
    cluster = Cluster.even(num_ranks, 1, num_expert_slots)
    loads = lognormal(seed, 3, num_experts)
    today = balance(loads, cluster).placement
    drifted = loads * lognormal(seed + 1, 3, num_experts, 0.3)
    plan = balance(drifted, cluster, current=today, max_moves=max_moves, target=1.0)
    check(plan.placement, cluster)
    assert plan.moved_replicas == moved_replicas(today, plan.placement) <= max_moves
    assert (plan.balancedness_L >= balancedness(today, drifted) - 1e-6).all()


def test_a_dead_ranks_experts_come_back_whatever_the_budget() -> None:
    loads = lognormal(3, 4, 32)
    today = balance(loads, Cluster.even(8, 2, 6)).placement
    slots = (6, 6, 0, 6, 6, 6, 6, 6)
    plan = balance(loads, Cluster(slots, (0,) * 8), current=today, max_moves=0)
    check(plan.placement, Cluster(slots, (0,) * 8))
    lost = sum(
        len(set(range(32)) - set(np.delete(layer, 2, axis=0).ravel().tolist()))
        for layer in today.slot_to_expert_LRS
    )
    assert plan.moved_replicas == lost


def test_replicas_that_stay_keep_their_slot() -> None:
    loads = lognormal(5, 4, 32)
    cluster = Cluster.even(8, 1, 6)
    today = balance(loads, cluster).placement
    plan = balance(
        loads * lognormal(6, 4, 32, 0.3), cluster, current=today, max_moves=20, target=1.0
    )
    changed = int((plan.placement.slot_to_expert_LRS != today.slot_to_expert_LRS).sum())
    assert 0 < changed == plan.moved_replicas


def test_a_windows_steps_count_by_their_own_maxima() -> None:
    placement = Placement(2, np.array([[[0], [1]]], np.int16))
    window = np.array([[[3.0, 1.0]], [[1.0, 3.0]]])
    assert balancedness(placement, window.sum(axis=0))[0] == 1.0
    assert balancedness(placement, window)[0] == pytest.approx(4 / 6)


def test_a_window_chooses_by_its_steps() -> None:
    """Place two experts on one rank if no step uses both: loads by step show it, their sums do not."""
    window = np.array([[[9.0, 0, 1, 1]], [[0, 9.0, 1, 1]]])
    cluster = Cluster.even(2, 1, 2)
    by_sums, by_steps = balance(window.sum(axis=0), cluster), balance(window, cluster)
    together = [{0, 1}, {2, 3}]
    assert sorted(map(set, by_steps.placement.slot_to_expert_LRS[0].tolist()), key=min) == together
    assert by_steps.balancedness_L[0] > balancedness(by_sums.placement, window)[0]
    near = balance(window, cluster, current=by_sums.placement, max_moves=2, target=1.0)
    assert sorted(map(set, near.placement.slot_to_expert_LRS[0].tolist()), key=min) == together
    assert near.moved_replicas == 2


@given(
    st.integers(0, 2**31),
    st.sampled_from(["global", "hierarchical", "hybrid"]),
    st.sampled_from([None, 0, 5, 40]),
    st.booleans(),
)
def test_a_windows_plan_is_sound(
    seed: int, mode: str, max_moves: int | None, weighted: bool
) -> None:
    cluster = Cluster.even(8, 2, 4)
    random = np.random.default_rng(seed)
    window = lognormal(seed, 3, 24) * np.exp(0.8 * random.standard_normal((5, 3, 24)))
    today = balance(
        lognormal(seed + 1, 3, 24), cluster, mode="hierarchical", num_groups=4
    ).placement
    kwargs = {"mode": mode, "num_groups": 4, "weighted": weighted, "target": 1.0}
    plan = balance(window, cluster, current=today, max_moves=max_moves, **kwargs)
    check(plan.placement, cluster)
    if max_moves is not None:
        assert plan.moved_replicas <= max_moves
        assert (plan.balancedness_L >= balancedness(today, window) - 1e-6).all()
    if mode == "hierarchical":
        for layer in plan.placement.slot_to_expert_LRS.reshape(3, 2, -1) // 6:
            assert not set(layer[0].tolist()) & set(layer[1].tolist())


def test_a_window_beats_its_sums_on_loads_that_come_by_turns() -> None:
    random = np.random.default_rng(2)
    kinds = [lognormal(kind, 6, 64) for kind in range(3)]
    window, later = (np.stack([kinds[random.integers(3)] for _ in range(12)]) for _ in range(2))
    cluster = Cluster.even(8, 1, 10)
    today = balance(kinds[0], cluster).placement
    for options in (
        {},
        {"current": today, "max_moves": 60},
        {"current": today, "max_moves": 0, "weighted": True},
    ):
        by_sums = balance(window.sum(axis=0), cluster, **options)
        by_steps = balance(window, cluster, **options)
        seen = [
            balancedness(plan.placement, later, plan.split_LRS).mean()
            for plan in (by_sums, by_steps)
        ]
        assert seen[1] > seen[0] + (0.005 if not options.get("weighted") else 0), options


@given(st.integers(0, 2**31), st.sampled_from([0, 4, 20]), st.sampled_from([4, 2]))
def test_near_todays_groups_stay_on_their_node(
    seed: int, max_moves: int, num_expert_slots: int
) -> None:
    num_experts = 24 if num_expert_slots == 4 else 12
    cluster = Cluster.even(8, 2, num_expert_slots)
    first = balance(
        lognormal(seed, 3, num_experts), cluster, mode="hierarchical", num_groups=4
    ).placement
    loads = lognormal(seed + 1, 3, num_experts)
    near = {
        mode: balance(
            loads, cluster, mode=mode, num_groups=4, current=first, max_moves=max_moves, target=1.0
        )
        for mode in ("hierarchical", "hybrid")
    }
    for plan in near.values():
        check(plan.placement, cluster)
        assert plan.moved_replicas <= max_moves
        assert (plan.balancedness_L >= balancedness(first, loads) - 1e-6).all()
    for layer in near["hierarchical"].placement.slot_to_expert_LRS.reshape(3, 2, -1) // (
        num_experts // 4
    ):
        assert not set(layer[0].tolist()) & set(layer[1].tolist())
    assert near["hierarchical"].moved_across_nodes == 0
    assert (near["hybrid"].balancedness_L >= near["hierarchical"].balancedness_L - 1e-6).all()


def test_moves_across_nodes_are_experts_new_to_a_node() -> None:
    cluster = Cluster.even(4, 2, 1)
    old, new = (
        Placement(4, np.array([[[e] for e in row]], np.int16))
        for row in ([0, 1, 2, 3], [1, 0, 3, 1])
    )
    assert moved_replicas(old, new) == 4
    assert moved_replicas(old, new, cluster.nodes) == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mode": "best"}, "unknown"),
        ({"num_groups": 3, "mode": "hierarchical"}, "groups"),
        ({"loads": -np.ones((2, 8))}, "0 or more"),
        ({"loads": np.full((2, 8), np.nan)}, "numbers"),
        ({"loads": np.ones(8)}, "layers"),
        ({"cluster": Cluster.even(2, 1, 3)}, "too few"),
        ({"max_moves": 3}, "current placement"),
    ],
)
def test_refuses(change: dict, complaint: str) -> None:
    arguments = {"loads": np.ones((2, 8)), "cluster": Cluster.even(4, 2, 3), **change}
    with pytest.raises(ValueError, match=complaint):
        balance(**arguments)


def test_a_layer_without_tokens_is_spread_evenly() -> None:
    plan = balance(np.zeros((1, 8)), Cluster.even(4, 1, 3))
    assert plan.placement.check() == []
    assert plan.balancedness_L[0] == 1.0


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_expert_slots", "mode", "mean", "worst"),
    [
        ("prefill_in1024", 32, 9, "global", 0.999, 0.998),
        ("prefill_in1024", 32, 9, "fast", 0.993, 0.987),
        (
            "prefill_in1024",
            32,
            9,
            "hierarchical",
            0.8732,
            0.60,
        ),  # 99.9 % of 0.8740, the exact ceiling.
        ("prefill_in1024", 32, 9, "hybrid", 0.98, 0.98),
        ("prefill_in1024", 72, 4, "global", 0.997, 0.99),
        ("prefill_in1024", 96, 3, "global", 0.985, 0.97),
        (
            "decode_in2000out100",
            144,
            2,
            "global",
            0.873,
            0.66,
        ),  # 99.4 % of 0.8783, the exact optimum.
    ],
)
def test_measured_loads(
    name: str, num_ranks: int, num_expert_slots: int, mode: str, mean: float, worst: float
) -> None:
    cluster = Cluster.even(num_ranks, 4, num_expert_slots)
    plan = balance(measured(name), cluster, mode=mode, num_groups=8)
    check(plan.placement, cluster)
    assert plan.balancedness_L.mean() >= mean
    assert plan.balancedness_L.min() >= worst


@pytest.mark.parametrize(
    ("num_ranks", "num_expert_slots", "limit", "target", "at_least"),
    [(32, 9, 0.10, 0.99, 0.995), (72, 4, 0.16, 0.975, 0.99), (144, 2, 0.18, 1.0, 0.975)],
)
def test_few_moves_at_a_change_of_mix(
    num_ranks: int, num_expert_slots: int, limit: float, target: float, at_least: float
) -> None:
    """Check the hardest measured change against greedy from scratch (which moves 95 % of the slots)."""
    before, after = measured("decode_in1000out1000"), measured("decode_in2000out100")
    cluster = Cluster.even(num_ranks, 1, num_expert_slots)
    max_moves = int(limit * len(after) * num_ranks * num_expert_slots)
    today = balance(before, cluster).placement
    plan = balance(after, cluster, current=today, max_moves=max_moves, target=target)
    assert plan.moved_replicas <= max_moves
    greedy = balance(after, cluster, mode="fast").balancedness_L.mean()
    assert plan.balancedness_L.mean() >= at_least * greedy

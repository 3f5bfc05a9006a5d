"""Placements: the even start, losses of ranks, and the encoding in bytes."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from hadal.core.placement import (
    EMPTY,
    SPLIT_PARTS,
    Placement,
    parts_of,
    spread,
    spread_by_node,
    without,
)
from tests.fresh import fresh

SEEDS = [0, 1, fresh().randrange(2**32)]


def held(placement: Placement, layer: int, rank: int) -> list[int]:
    return [int(e) for e in placement.slot_to_expert_LRS[layer, rank] if e != EMPTY]


def counts(placement: Placement, layer: int) -> list[int]:
    return [placement.replicas(layer)[1][expert] for expert in range(placement.num_experts)]


@pytest.mark.parametrize(("num_ranks", "num_expert_slots"), [(32, 9), (144, 2)])
def test_published_units(num_ranks: int, num_expert_slots: int) -> None:
    """Check 256 + 32 experts in 58 layers: 9 slots per rank in prefill, 2 in decode (DeepSeek's overview)."""
    placement = spread(58, 256, num_ranks, 32)
    assert placement.slot_to_expert_LRS.shape == (58, num_ranks, num_expert_slots)
    assert placement.check() == []
    assert EMPTY not in placement.slot_to_expert_LRS
    for layer in (0, 1, 57):
        assert sorted(counts(placement, layer)) == [1] * 224 + [2] * 32
    # Each layer doubles different experts.
    assert counts(placement, 0) != counts(placement, 1)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_redundant"),
    [
        (8, 1, 0),
        (8, 2, 0),
        (8, 4, 0),
        (8, 8, 0),
        (8, 4, 4),
        (8, 2, 8),
        (8, 8, 8),
        (16, 3, 2),
        (6, 4, 6),
        (4, 4, 12),
    ],
)
def test_spread(num_experts: int, num_ranks: int, num_redundant: int) -> None:
    placement = spread(5, num_experts, num_ranks, num_redundant)
    assert placement.check() == []
    assert (placement.num_layers, placement.num_ranks) == (5, num_ranks)
    assert placement.num_expert_slots * num_ranks == num_experts + num_redundant
    for layer in range(5):
        assert max(counts(placement, layer)) - min(counts(placement, layer)) <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_of_any_size_is_sound_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    refused = []
    for _ in range(60):
        num_experts, num_ranks = rng.randint(1, 40), rng.randint(1, 12)
        num_redundant = -num_experts % num_ranks + num_ranks * rng.randint(0, 3)
        try:
            placement = spread(2, num_experts, num_ranks, num_redundant)
        except ValueError as error:
            refused.append(str(error))
            continue
        assert placement.check() == []
    assert all("more than the" in error or "twice" in error for error in refused)
    print(f"{len(refused)} of 60 refused")
    assert len(refused) < 40


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_redundant"), [(8, 3, 0), (8, 4, 2), (8, 0, 0), (8, 2, -2)]
)
def test_uneven_sizes_are_refused(num_experts: int, num_ranks: int, num_redundant: int) -> None:
    with pytest.raises(ValueError, match="do not divide evenly"):
        spread(1, num_experts, num_ranks, num_redundant)


def test_more_slots_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="5 slots on a rank are more than the 4 experts"):
        spread(1, 4, 2, 6)


def test_replicas() -> None:
    placement = Placement(3, np.array([[[0, 1], [2, 0]]], np.int16))
    table, num = placement.replicas(0)
    assert num.tolist() == [2, 1, 1]
    assert table.tolist() == [[0, 3], [1, 1], [2, 2]]


def test_replicas_agree_with_the_slots() -> None:
    placement = without(spread(3, 16, 4, 8), [1])
    for layer in range(3):
        table, num = placement.replicas(layer)
        slots = placement.slot_to_expert_LRS[layer].reshape(-1)
        for expert in range(16):
            mine = table[expert, : num[expert]].tolist()
            assert mine == np.flatnonzero(slots == expert).tolist()
            assert (table[expert, num[expert] :] == mine[0]).all()


def test_check_finds_what_is_wrong() -> None:
    found = Placement(3, np.array([[[0, 1], [0, EMPTY]]], np.int16)).check()
    assert found == ["layer 0: no replica of experts [2]"]
    found = Placement(2, np.array([[[0, 0], [1, EMPTY]]], np.int16)).check()
    assert found == ["layer 0: rank 0 holds an expert twice"]
    assert Placement(2, np.array([[[0, 1], [EMPTY, EMPTY]]], np.int16)).check() == []
    assert Placement(2, np.array([[[0], [1]], [[0], [0]]], np.int16)).missing() == [set(), {1}]


def check_without(before: Placement, lost: list[int]) -> Placement:
    after = without(before, lost)
    assert after.check() == []
    for layer in range(before.num_layers):
        for rank in range(before.num_ranks):
            mine = held(after, layer, rank)
            if rank in lost:
                assert mine == []
                continue
            # A survivor's replicas keep their slots, so none of them is read again.
            kept = held(before, layer, rank)
            assert mine[: len(kept)] == kept
            # The rank took over no expert that another survivor still has.
            others = {
                e
                for r in range(before.num_ranks)
                if r != rank and r not in lost
                for e in held(before, layer, r)
            }
            assert not others & set(mine[len(kept) :])
    return after


def test_without_one_of_each() -> None:
    before = spread(4, 8, 4, 4)
    for lost in range(4):
        check_without(before, [lost])


@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_without_spreads_the_orphans_evenly(num_lost: int) -> None:
    before = spread(3, 16, 4, 0)
    for lost in combinations(range(4), num_lost):
        after = check_without(before, list(lost))
        for layer in range(3):
            sizes = [len(held(after, layer, rank)) for rank in range(4) if rank not in lost]
            assert sum(sizes) == 16
            assert max(sizes) - min(sizes) <= 1


def test_without_loads_nothing_that_has_another_replica() -> None:
    """Lose a rank of EP2 with every expert doubled: the survivor has all experts already."""
    before = spread(2, 8, 2, 8)
    after = check_without(before, [0])
    assert after.num_expert_slots == before.num_expert_slots == 8


def test_without_at_full_size() -> None:
    for num_ranks in (32, 144):
        check_without(spread(1, 256, num_ranks, 32), [5])
        after = without(spread(58, 256, num_ranks, 32), [5])
        assert after.check() == []
        assert after.num_expert_slots == 288 // num_ranks + 1


def test_without_nobody() -> None:
    before = spread(2, 8, 4)
    assert (without(before, []).slot_to_expert_LRS == before.slot_to_expert_LRS).all()


def test_without_is_repeatable_and_in_any_order() -> None:
    """Lose two ranks at once or one by one: both are valid, and equal inputs give equal placements."""
    before = spread(3, 8, 4, 4)
    assert (
        without(before, [1, 3]).slot_to_expert_LRS == without(before, {3, 1}).slot_to_expert_LRS
    ).all()
    check_without(check_without(before, [1]), [1, 3])


def test_nobody_survives() -> None:
    with pytest.raises(ValueError, match="no rank survives"):
        without(spread(1, 4, 2), [0, 1])


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_round_trip(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        before = spread(rng.randint(1, 6), 16, 4, rng.choice([0, 4, 8]))
        before = without(before, rng.sample(range(4), rng.randint(0, 2)))
        data = before.to_bytes()
        assert len(data) == 2 * before.slot_to_expert_LRS.size
        after = Placement.from_bytes(
            data, before.num_experts, before.num_ranks, before.num_expert_slots
        )
        assert (after.slot_to_expert_LRS == before.slot_to_expert_LRS).all()
        assert (after.num_layers, after.num_experts) == (before.num_layers, before.num_experts)
    with pytest.raises(ValueError, match=r"reshape|size"):
        Placement.from_bytes(
            data[:-2], before.num_experts, before.num_ranks, before.num_expert_slots
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_follow_a_split(seed: int) -> None:
    """Check that a replica's share of turns is within 1/SPLIT_PARTS of its split, and evenly spread."""
    rng = np.random.default_rng(seed)
    even = spread(2, 16, 4, 8)
    slots = even.slot_to_expert_LRS[1]
    split = rng.random(slots.shape)
    for expert in range(16):
        split[slots == expert] /= split[slots == expert].sum()
    parts = parts_of(slots, split)
    placement = even.with_layer(1, slots, parts)
    assert placement.check() == [], seed
    table, number = placement.replicas(1)
    for expert in range(16):
        turns = table[expert, : number[expert]]
        for slot in np.flatnonzero(slots.reshape(-1) == expert):
            share = np.count_nonzero(turns == slot) / len(turns)
            assert abs(share - split.reshape(-1)[slot]) <= 1 / SPLIT_PARTS, (seed, expert)
            # The first half of the turns nearly follows the split already.
            half = np.count_nonzero(turns[: len(turns) // 2] == slot)
            assert abs(half - np.count_nonzero(turns == slot) / 2) <= 1, (seed, expert)
    # The neighbouring layer keeps its even turns.
    for ours, theirs in zip(placement.replicas(0), even.replicas(0), strict=True):
        assert np.array_equal(ours, theirs)
    again = Placement.from_bytes(
        placement.to_bytes(), 16, 4, placement.num_expert_slots, placement.weights_bytes()
    )
    assert np.array_equal(again.replicas(1)[0], table)


def test_equal_splits_take_equal_turns() -> None:
    even = spread(1, 8, 4, 8)
    slots = even.slot_to_expert_LRS[0]
    parts = parts_of(slots, np.full(slots.shape, 0.5))
    assert (parts == 1).all()
    for ours, theirs in zip(
        even.with_layer(0, slots, parts).replicas(0), even.replicas(0), strict=True
    ):
        assert np.array_equal(ours, theirs)


def test_an_expert_whose_replicas_take_nothing_is_a_problem() -> None:
    even = spread(1, 8, 4, 8)
    parts = np.ones(even.slot_to_expert_LRS[0].shape, np.uint8)
    parts[even.slot_to_expert_LRS[0] == 3] = 0
    problems = even.with_layer(0, even.slot_to_expert_LRS[0], parts).check()
    assert problems == ["layer 0: no replica takes tokens of experts [3]"]
    with pytest.raises(ValueError, match="does not fit"):
        even.with_layer(0, even.slot_to_expert_LRS[0][:2], None)


def test_neighbours_share_a_node() -> None:
    """Check the published prefill unit: 8 groups on 4 nodes of 8 ranks, two per node with replicas."""
    placement = spread_by_node(3, 256, 32, 32, 4)
    assert placement.check() == []
    assert placement.slot_to_expert_LRS.shape == (3, 32, 9)
    for node in range(4):
        of_node = placement.slot_to_expert_LRS[:, 8 * node : 8 * node + 8]
        assert {int(expert) // 64 for expert in of_node.flat} == {node}
    with pytest.raises(ValueError, match="over 3 nodes"):
        spread_by_node(1, 256, 33, 0, 3)


def test_what_an_experts_slots_have_adds_up_and_empty_slots_do_not_count() -> None:
    slots = np.array([[[0, 1], [1, EMPTY]], [[2, 0], [EMPTY, EMPTY]]], np.int16)
    amounts = np.array([[[1.0, 2.0], [4.0, 8.0]], [[16.0, 32.0], [64.0, 128.0]]])
    assert Placement(3, slots).by_expert(amounts).tolist() == [[1.0, 6.0, 0.0], [32.0, 0.0, 16.0]]

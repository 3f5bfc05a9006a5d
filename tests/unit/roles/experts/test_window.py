"""Test that counts become logical loads under any placement, fade with age, and yield the balance."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.balance import EXPERTS, EXPERTS_WORST
from hadal.core.placement import EMPTY, Placement, spread, without
from hadal.roles.experts.window import CountsWindow

NUM_EXPERTS = 6


def dealt(placement: Placement, loads_LE: list[list[int]]) -> np.ndarray:
    """Return counts with all tokens of an expert at its first replica."""
    counts = np.zeros(placement.slot_to_expert_LRS.shape, np.int64)
    for layer, loads in enumerate(loads_LE):
        for expert, load in enumerate(loads):
            rank, slot = np.argwhere(placement.slot_to_expert_LRS[layer] == expert)[0]
            counts[layer, rank, slot] = load
    return counts


def test_loads_do_not_depend_on_the_placement() -> None:
    loads = [[1, 2, 3, 4, 5, 6], [9, 0, 0, 0, 0, 7]]
    for placement in (
        spread(2, NUM_EXPERTS, 3),
        spread(2, NUM_EXPERTS, 3, 6),
        without(spread(2, NUM_EXPERTS, 3), {1}),
    ):
        window = CountsWindow(2, NUM_EXPERTS, 4, 2.0)
        window.add(placement, dealt(placement, loads), (0, 1, 2))
        assert window.summed().tolist() == loads
        assert [window.num_tokens(layer) for layer in (0, 1)] == [21, 16]


def test_empty_slots_hold_no_expert() -> None:
    placement = Placement(2, np.array([[[0, EMPTY], [1, EMPTY]]], np.int16))
    window = CountsWindow(1, 2, 4, 2.0)
    window.add(placement, np.array([[[3, 9], [5, 9]]]), (0, 1))
    assert window.summed().tolist() == [[3, 5]]


def test_intervals_fade_and_fall_out() -> None:
    placement, window = spread(1, NUM_EXPERTS, 3), CountsWindow(1, NUM_EXPERTS, 3, 1.0)
    for number in range(4):
        window.add(
            placement,
            dealt(placement, [[8 if expert == number else 0 for expert in range(6)]]),
            (0, 1, 2),
        )
    assert (len(window), window.number) == (3, 4)
    assert window.summed().tolist() == [[0, 2, 4, 8, 0, 0]]
    even, odd = window.halves(0)
    assert even.tolist() == [[0, 0, 4, 0, 0, 0]]
    assert odd.tolist() == [[0, 2, 0, 0, 0, 0], [0, 0, 0, 8, 0, 0]]
    window.add(placement, dealt(placement, [[8] * 6]), (0, 1, 2))
    assert window.halves(0)[1].tolist() == [[0, 0, 0, 4, 0, 0]], "an interval stays in its half"


def test_parts_make_one_interval() -> None:
    """Traced steps are counted one by one; this must not shorten the window."""
    loads = [[1, 2, 3, 4, 5, 6], [9, 0, 0, 0, 0, 7]]
    first, second = spread(2, NUM_EXPERTS, 3), spread(2, NUM_EXPERTS, 3, 6)
    once, parts = CountsWindow(2, NUM_EXPERTS, 4, 2.0), CountsWindow(2, NUM_EXPERTS, 4, 2.0)
    for _ in range(2):
        once.add(first, 2 * dealt(first, loads), (0, 1, 2))
        alone = parts.add(first, dealt(first, loads), (0, 1, 2), is_whole=False)
        assert alone == pytest.approx(once.balance()), "a part has a balance of its own"
        parts.add(first, dealt(first, loads), (0, 1, 2))
    assert (len(parts), parts.number, parts.balance()) == (len(once), once.number, once.balance())
    assert (parts.halves(0)[0] == once.halves(0)[0]).all()
    # Parts before and after a flip count the same experts.
    parts.add(first, dealt(first, loads), (0, 1, 2), is_whole=False)
    parts.add(second, np.zeros_like(dealt(second, loads)), (0, 1, 2))
    assert parts.halves(1)[0][-1].tolist() == loads[1]
    parts.add(first, dealt(first, loads), (0, 1, 2), is_whole=False)
    parts.drop_part()
    parts.add(first, dealt(first, [[1] * 6, [1] * 6]), (0, 2))
    assert parts.halves(0)[1][-1].tolist() == [1] * 6


def test_nothing_received_is_no_interval() -> None:
    placement, window = spread(1, NUM_EXPERTS, 3), CountsWindow(1, NUM_EXPERTS, 3, 1.0)
    assert window.add(placement, np.zeros((1, 3, 2), np.int64), (0, 1, 2)) == {}
    assert (len(window), window.balance()) == (0, {})


def test_balance_is_of_ranks_as_it_fell() -> None:
    placement, window = spread(2, NUM_EXPERTS, 3), CountsWindow(2, NUM_EXPERTS, 3, 1.0)
    counts = np.array([[[1, 1], [2, 2], [3, 3]], [[4, 0], [0, 4], [2, 2]]])
    found = window.add(placement, counts, (0, 1, 2))
    assert found == {EXPERTS: pytest.approx((4 / 6 + 1.0) / 2), EXPERTS_WORST: pytest.approx(4 / 6)}
    assert window.balance() == found
    # Rank 0 is absent.
    assert window.add(placement, counts, (1, 2))[EXPERTS_WORST] == pytest.approx(5 / 6)
    counts[1] = 0
    assert window.add(placement, counts, (0, 1, 2)) == {EXPERTS: 4 / 6, EXPERTS_WORST: 4 / 6}

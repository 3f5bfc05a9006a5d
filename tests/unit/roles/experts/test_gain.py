"""Test the time that a placement saves, when the gain is more than chance, and when it exceeds its cost."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.placement import Placement, spread
from hadal.roles.experts.gain import ExpertTerms, fractions, heaviest, pays, sure_gain

TERMS = ExpertTerms()


def test_fractions_follow_the_parts() -> None:
    slots = np.array([[[0, 1], [0, 2]]], np.int16)
    assert fractions(Placement(3, slots)).tolist() == [[[0.5, 1], [0.5, 1]]]
    weights = np.array([[[4, 1], [12, 1]]], np.uint8)
    assert fractions(Placement(3, slots, weights)).tolist() == [[[0.25, 1], [0.75, 1]]]
    empty = np.array([[[0, 1], [-1, 2]]], np.int16)
    assert fractions(Placement(3, empty)).tolist() == [[[1, 1], [0, 1]]]


def test_the_heaviest_rank_of_each_interval() -> None:
    slots = np.array([[0, 1], [0, 2]], np.int16)
    loads = np.array([[8.0, 1.0, 2.0], [0.0, 7.0, 1.0]])
    assert heaviest(loads, slots, np.array([[0.25, 1], [0.75, 1]])).tolist() == [8.0, 7.0]


def test_a_gain_that_varies_is_chance() -> None:
    now = np.full(8, 100.0)
    assert sure_gain(now, np.full(8, 80.0), TERMS) == pytest.approx(0.2)
    assert sure_gain(now, 80.0 + np.array([60.0, -60.0] * 4), TERMS) == 0.0
    assert sure_gain(now, np.full(8, 99.5), TERMS) == 0.0, "less than can be seen"
    assert sure_gain(now, np.full(8, 120.0), TERMS) == 0.0
    assert sure_gain(now[:1], np.full(1, 80.0), TERMS) == 0.0, "one interval has no spread"
    assert sure_gain(np.zeros(4), np.zeros(4), TERMS) == 0.0


def test_no_gain_between_equals_whatever_is_drawn() -> None:
    """Two equally good placements under random loads: the second is preferred in at most 2 % of cases."""
    rng = np.random.default_rng(7)
    first = spread(1, 12, 4).slot_to_expert_LRS[0]
    shifted, whole, num_preferred = np.roll(first.ravel(), 1).reshape(4, 3), np.ones((4, 3)), 0
    for _ in range(400):
        loads = rng.poisson(30.0, (8, 12)).astype(np.float64)
        num_preferred += (
            sure_gain(heaviest(loads, first, whole), heaviest(loads, shifted, whole), TERMS) > 0.0
        )
    assert num_preferred <= 8


def test_a_gain_has_to_pay_for_what_travels() -> None:
    # A gain of 10 % of 1 ms over 1,000 steps is 100 ms, and must be twice the cost. 20 replicas, 20 ms
    # each, that slow steps by 10 % cost 40 ms, and the flip costs 2 ms.
    assert pays(0.1, 1e-3, 20, 0.02, 0.002, TERMS)
    assert not pays(0.1, 1e-3, 30, 0.02, 0.002, TERMS)
    assert pays(0.1, 1e-3, 0, 0.02, 0.002, TERMS)
    assert not pays(0.1, 3e-5, 0, 0.02, 0.002, TERMS), "not even a flip"
    assert not pays(0.0, 1.0, 0, 0.0, 0.0, TERMS)
    assert not pays(0.1, 0.0, 0, 0.0, 0.0, TERMS), "nothing grows with tokens"


def test_terms_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="half for the plan"):
        ExpertTerms(num_intervals=2, num_intervals_min=4)
    with pytest.raises(ValueError, match="count_every_steps"):
        ExpertTerms(count_every_steps=0)

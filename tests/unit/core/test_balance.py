"""Gauges of balance over ranks."""

from __future__ import annotations

import math

import pytest

from hadal.core.balance import OBJECTIVES, balance_of, mean_over_max, shown


def test_mean_over_max() -> None:
    assert mean_over_max([2, 2, 2]) == 1.0
    assert mean_over_max([4, 0]) == pytest.approx(0.5)
    assert mean_over_max([0, 0]) is None
    assert mean_over_max([]) is None


def test_objectives_that_nobody_has_any_of_are_left_out() -> None:
    found = balance_of({"kv": [3, 1], "tokens": [0, 0], "requests": []})
    assert found == {"kv": pytest.approx(2 / 3)}


def test_shown_are_known_names_with_finite_numbers_in_order() -> None:
    found = list(shown(dict.fromkeys(reversed(OBJECTIVES), 0.5)).items())
    assert found == [(name, 0.5) for name in OBJECTIVES]
    found = shown({"luck": 0.5, "kv": math.nan, "tokens": math.inf, "experts": 1})
    assert found == {"experts": 1.0}
    assert shown({"kv": None, "tokens": "0.5"}) == {}  # type: ignore[dict-item]
    assert shown({}) == {}

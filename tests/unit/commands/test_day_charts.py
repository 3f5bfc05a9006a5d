"""Parts of charts: round ticks, axes that hold what lies beyond them, lines with gaps, treads,
thinning.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.commands.day_charts import (
    Axis,
    Box,
    around,
    from_zero,
    path,
    round_values,
    stepped,
    thinned,
)

FINITE = st.floats(-1e15, 1e15, allow_nan=False)
BOX = Box(400.0, 200.0)


@given(FINITE, FINITE)
def test_round_values_cover_their_range_in_few_steps(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = round_values(low, high)
    assert 1 <= len(ticks) <= 9
    assert ticks == sorted(ticks)
    if len(ticks) > 1:
        slack = 1e-6 * (high - low)
        assert ticks[0] <= low + slack
        assert ticks[-1] >= high - slack


def test_values_that_can_hardly_be_told_from_nothing_have_an_axis() -> None:
    for values in ([5e-324], [0.0], [1e300, -1e300], [3.0, 3.0]):
        for axis in (from_zero(BOX, values), around(BOX, values)):
            assert all(BOX.top <= axis.at(value) <= BOX.bottom_px for value in values)


def test_round_values_are_round() -> None:
    assert round_values(0.0, 278.0, 4) == [0.0, 100.0, 200.0, 300.0]
    assert round_values(0.0, 1.27, 4) == [0.0, 0.5, 1.0, 1.5]
    assert round_values(5.0, 5.0) == [5.0]


@given(st.lists(FINITE, min_size=1, max_size=30))
def test_axes_hold_every_value_within_the_plot(values: list[float]) -> None:
    for axis in (from_zero(BOX, values), around(BOX, values)):
        assert all(
            BOX.top - 1e-6 <= axis.at(value) <= BOX.bottom_px + 1e-6
            for value in [*values, -1e300, 1e300]
        )


def test_an_axis_is_straight_or_logarithmic() -> None:
    assert Axis(0.0, 10.0, 100.0, 0.0).at(2.5) == 75.0
    axis = Axis(0.01, 10.0, 0.0, 300.0, is_log=True)
    assert axis.at(0.1) == pytest.approx(100.0)
    assert [round(tick, 9) for tick in axis.ticks()] == [
        0.01,
        0.02,
        0.05,
        0.1,
        0.2,
        0.5,
        1.0,
        2.0,
        5.0,
        10.0,
    ]


def test_a_line_breaks_at_gaps_and_a_lonely_point_is_a_dot() -> None:
    drawn = path([(0.0, 1.0), (1.0, 2.0), None, (3.0, 4.0)], "x")
    assert 'd="M0 1L1 2"' in drawn
    assert drawn.count("<circle") == 1
    assert path([None, None], "x") == ""


def test_treads_join_equal_neighbours() -> None:
    x, y = Axis(0.0, 4.0, 0.0, 40.0), Axis(0.0, 10.0, 10.0, 0.0)
    assert stepped(x, y, [1.0, 1.0, 3.0, 3.0]) == [
        (0.0, 9.0),
        (20.0, 9.0),
        (20.0, 7.0),
        (40.0, 7.0),
    ]
    assert stepped(x, y, []) == []


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=200), st.integers(1, 40))
def test_thinning_keeps_the_mean_of_equal_runs(values: list[float | None], num_max: int) -> None:
    found = thinned(values, num_max)
    assert len(found) <= num_max
    size = math.ceil(len(values) / num_max) or 1
    for index, mean in enumerate(found):
        run = [value for value in values[index * size : (index + 1) * size] if value is not None]
        assert (mean is None) == (not run)
        assert mean is None or mean == pytest.approx(sum(run) / len(run), abs=1e-6)

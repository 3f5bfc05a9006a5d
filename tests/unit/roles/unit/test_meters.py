"""Test meters: a step's duration, and a rate that fades."""

from __future__ import annotations

import pytest

from hadal.roles.unit.meters import BalanceMeter, LineMeter, RateMeter, StepMeter


def test_the_first_step_counts_whole_and_the_others_smoothed() -> None:
    meter = StepMeter()
    meter.done(0.010)
    assert (meter.num_steps, meter.step_ms) == (1, pytest.approx(10.0))
    meter.done(0.020)
    assert (meter.num_steps, meter.step_ms) == (2, pytest.approx(11.0))


def test_balance_is_smoothed_by_objective() -> None:
    meter = BalanceMeter(smoothing=0.5)
    meter.add({"tokens": 1.0})
    meter.add({"tokens": 0.5, "time": 0.25})
    meter.add({})
    assert meter.smoothed == {"tokens": 0.75, "time": 0.25}
    meter.reset()
    assert meter.smoothed == {}


def test_rate_settles_and_fades() -> None:
    rate = RateMeter(10.0)
    assert rate.per_s(0.0) == 0.0
    for tick in range(1000):
        rate.count(tick * 0.25)
    assert rate.per_s(250.0) == pytest.approx(4.0, rel=0.05)
    assert rate.per_s(300.0) < 0.1


def test_rate_is_right_early() -> None:
    rate = RateMeter(30.0)
    for tick in range(9):
        rate.count(float(tick))
    assert rate.per_s(8.0) == pytest.approx(1.0, rel=0.3)


def test_a_line_is_known_once_steps_differ_and_follows_what_came_lately() -> None:
    meter = LineMeter(memory=32.0)
    for _ in range(10):
        meter.add(8, 0.5)
    assert meter.line == (0.0, 0.0), "steps that are all alike say nothing"
    for num in (3, 4, 16, 2, 9) * 60:
        meter.add(num, 0.010 + 0.002 * num)
    assert meter.line == pytest.approx((0.010, 0.002), rel=0.05)
    for num in (3, 4, 16, 2, 9) * 60:
        meter.add(num, 0.030 - 0.001 * num)
    constant, slope = meter.line
    assert slope == 0.0, "more requests cost no less"
    assert 0.01 < constant < 0.03


def test_a_line_begins_where_a_single_request_was_seen() -> None:
    """Test steps that grow much with the second request and little with the twelfth, as on a CPU."""
    meter = LineMeter(memory=32.0)
    for seconds in (0.001, 0.001, 0.050, 0.001):  # One step was delayed.
        meter.add(1, seconds)
    assert meter.line == (0.0, 0.0), "nothing is known of more than one"
    for num in (11, 12, 13) * 20:
        meter.add(num, 0.006 + 0.0001 * num)
    constant, slope = meter.line
    assert constant + slope == pytest.approx(0.001, rel=0.06)
    assert constant + 12 * slope == pytest.approx(0.0072, rel=0.05)
    for _ in range(60):
        meter.add(2, 0.003)
    # Two requests take three times as long, but the constant is never below 0.
    assert meter.line == pytest.approx((0.0, 0.001), abs=0.0001)

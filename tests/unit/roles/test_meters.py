"""Meters: idle time of the Runner, and a rate that fades."""

from __future__ import annotations

import pytest

from hadal.roles.meters import RateMeter, StepMeter


def test_a_full_pipeline_has_no_overhead() -> None:
    meter = StepMeter()
    for step in range(1, 4):
        meter.done(step * 0.010, max(0, step - 2) * 0.010, 0.010)
    assert meter.num_steps == 3
    assert meter.step_ms == pytest.approx(10.0)
    assert meter.overhead_ms == pytest.approx(0.0, abs=1e-9)


def test_time_between_hand_over_and_done_beyond_the_runners_own_is_overhead() -> None:
    meter = StepMeter()
    meter.done(1.012, 1.0, 0.010)
    assert meter.overhead_ms == pytest.approx(2.0)


def test_waiting_for_work_is_not_overhead() -> None:
    meter = StepMeter()
    meter.done(1.010, 1.0, 0.010)
    meter.done(9.010, 9.0, 0.010)
    assert meter.overhead_ms == pytest.approx(0.0, abs=1e-9)


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

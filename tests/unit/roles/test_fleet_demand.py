"""Test samples from counters: none counts twice, a front's restart adds none; a day is learned."""

from __future__ import annotations

import pytest

from hadal.core.messages.fleet import Demand
from hadal.lab.sim.day.published import HOURLY_SHARES, SHAPE
from hadal.policy.demand import FLAT
from hadal.roles.fleet.demand import NUM_SAMPLES, DemandMeter


def demand(tokens_in: float, tokens_out: float = 0.0, epoch: str = "f") -> Demand:
    return Demand(epoch, round(tokens_in), round(tokens_out), 5, 6, ())


def test_a_sample_is_what_was_counted_over_the_time_it_took() -> None:
    meter = DemandMeter(60.0)
    meter.add(100.0, demand(1_000_000, 500))
    for index in range(1, 5):
        meter.add(100.0 + 20.0 * index, demand(1_000_000 + 2_000 * index, 500 + 100 * index))
    assert list(meter.times_s) == [130.0]
    assert list(meter.rates["prefill"]) == [pytest.approx(100.0)]
    assert list(meter.rates["decode"]) == [pytest.approx(5.0)]
    assert meter.backlog == {"prefill": 5.0, "decode": 6.0}


def test_a_lost_message_loses_no_tokens_and_a_double_adds_none() -> None:
    meter = DemandMeter(60.0)
    for time_s, tokens in ((0.0, 0), (10.0, 100), (10.0, 100), (90.0, 900)):
        meter.add(time_s, demand(tokens))
    assert list(meter.rates["prefill"]) == [pytest.approx(10.0)]
    assert list(meter.times_s) == [45.0]


def test_a_message_that_is_overtaken_says_nothing() -> None:
    meter = DemandMeter(10.0)
    for time_s, tokens in ((0.0, 0), (10.0, 100), (20.0, 300), (25.0, 200), (30.0, 400)):
        meter.add(time_s, demand(tokens, tokens / 2))
    assert list(meter.rates["prefill"]) == [pytest.approx(rate) for rate in (10.0, 20.0, 10.0)]
    late = Demand("f", 350, 200, 10**9, 10**9, ())
    meter.add(31.0, late)
    assert meter.backlog == {"prefill": 5.0, "decode": 6.0}


def test_a_new_front_counts_from_nothing() -> None:
    meter = DemandMeter(10.0)
    meter.add(0.0, demand(1e9))
    meter.add(10.0, demand(50, epoch="g"))
    assert list(meter.rates["prefill"]) == []
    meter.add(20.0, demand(150, epoch="g"))
    assert list(meter.rates["prefill"]) == [pytest.approx(10.0)]


def test_only_the_last_samples_are_kept() -> None:
    meter = DemandMeter(1.0)
    for second in range(100):
        meter.add(float(second), demand(second**2))
    assert len(meter.times_s) == len(meter.rates["decode"]) == NUM_SAMPLES
    assert meter.rates["prefill"][-1] == pytest.approx(197.0)


def test_an_hour_that_was_not_seen_is_not_learned() -> None:
    """No sample arrives from 1:30 to 4:10, so the fifth hour is not learned until the next day."""
    meter = DemandMeter(60.0)
    for minute in range(28 * 60 + 30):
        if not 90 < minute < 250:
            meter.add(60.0 * minute, demand(1000.0 * minute))
    assert meter.shape("prefill") is FLAT
    for minute in range(28 * 60 + 30, 29 * 60 + 2):
        meter.add(60.0 * minute, demand(1000.0 * minute))
    assert meter.shape("prefill") is not FLAT


def test_a_day_that_was_seen_is_the_shape_of_the_next() -> None:
    meter = DemandMeter(60.0)
    total = 0.0
    for minute in range(25 * 60 + 2):
        meter.add(60.0 * minute, demand(total, total / 4))
        if minute == 23 * 60:
            assert meter.shape("prefill") is FLAT
        total += 1e6 * HOURLY_SHARES[minute // 60 % 24]
    for role in ("prefill", "decode"):
        learned = meter.shape(role)
        for hour in range(24):
            found = float(learned.at(3600.0 * (hour + 0.5)))
            assert found == pytest.approx(float(SHAPE.at(3600.0 * (hour + 0.5))), rel=0.02)

"""The load clock: each hour has its share, the rate has no jumps, and both directions agree."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.lab.sim.day.clock import DEEPSEEK_SHARES, STEP_S, DemandClock, hour_beijing, hour_index
from hadal.lab.sim.day.published import HOUR_S
from hadal.policy.quotas import DAY_S

SHAPE = DemandClock()
HOURS_S = np.arange(25) * HOUR_S


def test_every_hour_has_its_share() -> None:
    shares = np.array(DEEPSEEK_SHARES)
    assert np.allclose(np.diff(SHAPE.load_s(HOURS_S)) / DAY_S, shares / shares.sum(), rtol=1e-9)
    for hour in range(24):
        at_s = np.arange(hour * HOUR_S, (hour + 1) * HOUR_S, STEP_S) + STEP_S / 2
        assert SHAPE.rate(at_s).sum() * STEP_S == pytest.approx(DAY_S * SHAPE.shares[hour])


def test_the_rate_is_positive_and_goes_over_from_hour_to_hour_without_a_jump() -> None:
    rate = SHAPE.rate(np.arange(0, 2 * DAY_S, STEP_S))
    assert rate.min() > 0.2
    # Neighbouring hours differ by up to 1.65x; a table without interpolation would jump by that.
    assert np.abs(np.diff(np.log(rate))).max() < 0.02
    assert rate.mean() == pytest.approx(1)


def test_both_directions_agree_over_days() -> None:
    at_s = np.random.default_rng(0).uniform(-3 * DAY_S, 5 * DAY_S, 1000)
    assert np.allclose(SHAPE.at_s(SHAPE.load_s(at_s)), at_s, atol=1e-6)
    assert np.all(np.diff(SHAPE.load_s(np.sort(at_s))) > 0)


def test_a_flat_day_is_a_clock() -> None:
    at_s = np.linspace(-DAY_S, 2 * DAY_S, 500)
    assert np.allclose(DemandClock((1 / 24,) * 24).load_s(at_s), at_s)


def test_hours_are_those_of_beijing() -> None:
    index = hour_index(np.array([0.0, HOUR_S - 1, 12 * HOUR_S, DAY_S - 1, -1.0]))
    assert [hour_beijing(at) for at in index.tolist()] == [12, 12, 0, 11, 11]
    assert DEEPSEEK_SHARES.index(min(DEEPSEEK_SHARES)) == 16  # 04:00


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.0, *DEEPSEEK_SHARES[1:])])
def test_refuses_what_is_no_day(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="give 24 shares above 0"):
        DemandClock(shares)

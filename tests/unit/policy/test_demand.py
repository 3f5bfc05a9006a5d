"""Forecast: a day's shape keeps each bin's mean; a real trend counts, noise does not."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.policy.demand import CHANGE_MAX, DAY_S, FLAT, DayShape, forecast, learned_shape

TIMES_S = tuple(60.0 * index for index in range(15))


def test_every_bin_keeps_its_mean_and_days_repeat() -> None:
    shape = DayShape((1.0, 2.0, 4.0, 3.0, 2.0, 1.5))
    seconds = np.arange(0.0, DAY_S, 6.0) + 3.0
    means = shape.at(seconds).reshape(6, -1).mean(1)
    assert means * 13.5 / 6 == pytest.approx([1.0, 2.0, 4.0, 3.0, 2.0, 1.5], rel=1e-9)
    assert shape.at(seconds + 3 * DAY_S) == pytest.approx(shape.at(seconds))
    assert float(shape.at(0.0)) == pytest.approx(float(shape.at(DAY_S - 1e-6)), rel=1e-6)


@pytest.mark.parametrize(
    "bins", [(), (1.0, 0.0), (1.0, -1.0), (1.0, float("nan")), (0.01, 5.0, 5.0, 5.0)]
)
def test_a_shape_that_is_empty_or_too_steep_is_refused(bins: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        DayShape(bins)


def test_what_is_too_steep_is_smoothed_when_it_is_learned() -> None:
    shape = learned_shape([0.0, 5.0, 5.0, 5.0])
    assert float(shape.at(np.arange(0.0, DAY_S, 60.0)).min()) > 0.0
    assert learned_shape([1.0, 2.0]) == DayShape((1.0, 2.0))
    with pytest.raises(ValueError, match="nothing was counted"):
        learned_shape([0.0, 0.0])


def test_nothing_seen_is_nothing_expected() -> None:
    assert forecast((), (), FLAT, 0.0, [0.0, 60.0]) == pytest.approx([0.0, 0.0])


def test_the_shape_says_what_the_morning_brings() -> None:
    shape = DayShape((1.0,) * 8 + (2.0,) * 16)
    times_s = tuple(7 * 3600.0 - 900.0 + time_s for time_s in TIMES_S)
    rates = tuple(10.0 * float(shape.at(time_s)) for time_s in times_s)
    ahead = forecast(times_s, rates, shape, 7 * 3600.0, [0.0, 2 * 3600.0])
    assert ahead == pytest.approx(10.0 * shape.at([7 * 3600.0, 9 * 3600.0]), rel=1e-6)
    assert ahead[1] > 1.8 * ahead[0]


def test_a_clear_trend_goes_on_for_as_long_as_it_was_seen_and_within_bounds() -> None:
    rates = tuple(100.0 + time_s / 60.0 for time_s in TIMES_S)
    now_s = TIMES_S[-1]
    ahead = forecast(TIMES_S, rates, FLAT, now_s, [0.0, 300.0, now_s, 10 * now_s])
    assert ahead == pytest.approx([114.0, 119.0, 128.0, 128.0])
    steep = tuple(1.0 + 100.0 * index for index in range(15))
    level, far = forecast(TIMES_S, steep, FLAT, now_s, [0.0, 600.0])
    assert far <= CHANGE_MAX * level
    falling = tuple(200.0 - 14.0 * index for index in range(15))
    assert forecast(TIMES_S, falling, FLAT, now_s, [0.0, 900.0]).min() >= 0.0


def test_noise_is_no_trend() -> None:
    """Forecast the mean of noisy samples: a false trend is rare and small."""
    random = np.random.default_rng(5)
    rises = []
    for _ in range(300):
        rates = tuple((100.0 + 5.0 * random.standard_normal(15)).tolist())
        level, far = forecast(TIMES_S, rates, FLAT, TIMES_S[-1], [0.0, 600.0])
        rises.append(abs(far - level))
    # 3 standard errors of 13 degrees of freedom: 1 in 100.
    assert sum(rise > 0.0 for rise in rises) <= 9
    assert max(rises) < 5.0


def test_few_samples_show_no_trend() -> None:
    assert forecast((0.0, 60.0), (10.0, 20.0), FLAT, 60.0, [600.0]) == pytest.approx([15.0])


def test_samples_of_one_moment_show_no_trend() -> None:
    rates = tuple(100.0 + index for index in range(15))
    ahead = forecast((60.0,) * 15, rates, FLAT, 60.0, [0.0, 600.0])
    assert ahead == pytest.approx([107.0, 107.0])

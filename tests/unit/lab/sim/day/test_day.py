"""The published day's shape and totals."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.lab.sim.day.published import FIRST_HOUR, HOURLY_SHARES, DemandCurve
from hadal.policy.demand import DAY_S
from tests.needs import shared_data


def test_a_day_of_the_curve_brings_the_days_tokens() -> None:
    curve = DemandCurve()
    times_s = np.arange(0.0, DAY_S, 30.0) + 15.0
    requests = sum(curve.requests_per_s(time_s) for time_s in times_s) * 30.0
    assert requests * curve.tokens_in_request == pytest.approx(608e9, rel=1e-6)
    assert requests * curve.tokens_out_request == pytest.approx(168e9, rel=1e-6)


def test_its_hours_have_their_shares() -> None:
    curve = DemandCurve()
    for hour, share in enumerate(HOURLY_SHARES):
        times_s = 3600.0 * hour + np.arange(0.0, 3600.0, 10.0) + 5.0
        tokens = (
            sum(curve.requests_per_s(time_s) for time_s in times_s) * 10.0 * curve.tokens_in_request
        )
        assert tokens / 608e9 == pytest.approx(share / sum(HOURLY_SHARES), rel=1e-4)


def test_the_shares_are_those_of_the_file() -> None:
    rows = shared_data("deepseek_arrival_shape.csv").read_text().split()[1:]
    rows = [row for row in rows if row[:2].isdigit()]
    assert int(rows[0][:2]) == FIRST_HOUR
    assert [(int(row[:2]), float(row.split(",")[1])) for row in rows] == [
        (hour % 24, HOURLY_SHARES[hour % 24]) for hour in range(FIRST_HOUR, FIRST_HOUR + 24)
    ]

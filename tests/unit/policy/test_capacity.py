"""The share of a unit's throughput that a latency promise allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.policy.capacity import USE_MAX, DecodePoint, decode_capacity, prefill_use, units_needed

POINTS = (
    DecodePoint(0.02, 100.0),
    DecodePoint(0.04, 300.0),
    DecodePoint(0.06, 350.0),
    DecodePoint(0.08, 340.0),
)


def test_between_points_it_is_linear_and_beyond_the_last_nothing_is_promised() -> None:
    assert decode_capacity(POINTS, 0.03) == pytest.approx(200.0)
    assert decode_capacity(POINTS, 0.06) == pytest.approx(350.0)
    assert decode_capacity(POINTS, 9.0) == pytest.approx(350.0)
    assert decode_capacity(POINTS[::-1], 0.02) == pytest.approx(100.0)


def test_a_promise_that_nobody_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match="the fastest takes 20 ms"):
        decode_capacity(POINTS, 0.01)
    with pytest.raises(ValueError, match="one measured"):
        decode_capacity((), 0.01)
    with pytest.raises(ValueError, match="raise the limit"):
        prefill_use(2.0, 2.0, 4)
    with pytest.raises(ValueError, match="num_servers"):
        prefill_use(1.0, 2.0, 0)


def test_one_server_is_the_formula_of_pollaczek_and_khinchine() -> None:
    # M/M/1: the time in the system is service / (1 - use).
    assert prefill_use(1.0, 4.0, 1) == pytest.approx(0.75, rel=1e-6)
    # M/D/1: half the wait.
    assert prefill_use(1.0, 1.0 + 0.5 * 0.8 / 0.2, 1, variation=0.0) == pytest.approx(0.8, rel=1e-6)


@given(st.floats(0.01, 1.0), st.floats(1.01, 50.0), st.integers(1, 200), st.floats(0.0, 3.0))
def test_more_servers_and_more_time_may_be_busier(
    service_s: float, times: float, num: int, variation: float
) -> None:
    use = prefill_use(service_s, service_s * times, num, variation)
    assert 0.0 <= use <= USE_MAX
    assert prefill_use(service_s, service_s * times, num + 1, variation) >= use - 1e-9
    assert prefill_use(service_s, service_s * times * 1.1, num, variation) >= use - 1e-9


def test_units_are_demand_over_what_is_used_of_one() -> None:
    assert units_needed(900.0, 100.0, 0.9) == pytest.approx(10.0)
    for unit_tokens_per_s, use in ((0.0, 0.5), (1.0, 0.0), (1.0, 1.1)):
        with pytest.raises(ValueError, match="use above 0"):
            units_needed(1.0, unit_tokens_per_s, use)

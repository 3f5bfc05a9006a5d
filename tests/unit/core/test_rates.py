"""StepRates: a chunk's seconds, and the most tokens that fit into a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.rates import StepRates

rates = st.builds(
    StepRates, st.floats(1e-6, 1e-3), st.sampled_from([0.0, 1e-10, 1e-8, 1e-6]), st.floats(0, 1e-4)
)


@given(rates, st.integers(0, 200_000), st.integers(0, 40_000), st.floats(0, 100))
def test_the_most_that_fits(of: StepRates, start: int, num_tokens: int, budget_s: float) -> None:
    n, seconds = of.fit(start, num_tokens, budget_s)
    assert seconds == pytest.approx(of.chunk_s(start, n))
    slack_s = 1e-9 * budget_s
    assert 0 <= n <= num_tokens
    assert n == 0 or of.chunk_s(start, n) <= budget_s + slack_s
    assert n == num_tokens or of.chunk_s(start, n + 1) > budget_s - slack_s


def test_a_token_costs_the_unit_what_others_do_for_it_as_well() -> None:
    of = StepRates(1.0, 0.5, dispatch_s=2.0, step_s=100.0, mean_s=4.0)
    assert of.chunk_s(10, 2) == 2 * 1.0 + 0.5 * (11 + 12)
    assert of.all_token_s == 7.0
    assert of.whole_s(10, 2) == of.chunk_s(10, 2) + 2 * (2.0 + 4.0)


@pytest.mark.parametrize(
    "wrong",
    [
        (0.0, 1e-8),
        (1e-5, -1.0),
        (1e-5, 0.0, -1.0),
        (1e-5, 0.0, 0.0, -1.0),
        (1e-5, 0.0, 0.0, 0.0, -1.0),
    ],
)
def test_what_cannot_be_is_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="token_s"):
        StepRates(*wrong)

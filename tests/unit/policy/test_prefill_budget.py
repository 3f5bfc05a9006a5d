"""prefill_budget: steps sized by their work, shorter while few ranks have dense prompts."""

from __future__ import annotations

import pytest

from hadal.core.rates import StepRates
from hadal.policy.prefill_balance import cut_rank
from hadal.policy.prefill_budget import (
    CAPS,
    FIXED_SHARE,
    SCALES,
    WORTH,
    StepLimits,
    choose_budget,
    predict,
    step_budget_s,
)
from hadal.policy.views import PromptView

RATES = StepRates(3.3e-5, 1e-8, 2e-5)
LIMITS = StepLimits(8192, 16384)


def test_a_step_takes_no_more_than_its_share_of_what_is_there() -> None:
    dense = [PromptView(8000, 0, 100_000)]
    alone_s = step_budget_s(dense, 32, RATES, 8192)
    assert alone_s < step_budget_s(dense * 200, 32, RATES, 8192)
    assert alone_s >= 0.5 * RATES.chunk_s(0, 8192)


@pytest.mark.parametrize("mean_s", [0.0, 1e-5])
def test_steps_of_little_work_are_as_long_as_their_fixed_cost_asks_for(mean_s: float) -> None:
    rates = StepRates(3.3e-5, 0.0, step_s=0.045, mean_s=mean_s)
    budget_s = step_budget_s([PromptView(3000, 0, 0)], 32, rates, 16384)
    whole_s = rates.whole_s(0, round(budget_s / rates.token_s))
    assert rates.step_s / (rates.step_s + whole_s) == pytest.approx(FIXED_SHARE, rel=1e-3)


def test_few_dense_ranks_get_less_time_and_all_dense_ones_all_of_it() -> None:
    dense, light = [PromptView(60_000, 0, 60_000)], [PromptView(3000, 0, 0)] * 4
    nominal_s = RATES.chunk_s(60_000, 8192)
    few_s, _ = choose_budget([dense, *[light] * 7], RATES, nominal_s, LIMITS)
    all_s, _ = choose_budget([dense] * 8, RATES, nominal_s, LIMITS)
    assert few_s < all_s == nominal_s
    assert few_s == pytest.approx(min(SCALES) * nominal_s)


def test_light_ranks_may_take_more_tokens_where_dispatch_is_free() -> None:
    dense, light = [PromptView(60_000, 0, 60_000)], [PromptView(3000, 0, 0)] * 9
    free, dear = StepRates(3.3e-5, 1e-8), StepRates(3.3e-5, 1e-8, 1e-3)
    caps = [choose_budget([dense, light], rates, 1.0, LIMITS)[1] for rates in (free, dear)]
    assert caps == [CAPS[-1] * 8192, CAPS[0] * 8192]


def test_without_prompts_the_budget_is_the_nominal_one() -> None:
    assert choose_budget([[], []], RATES, 0.5, LIMITS) == (0.5, 16384)


def test_efficiency_is_the_mean_over_the_slowest_and_what_a_step_costs_anyway() -> None:
    rates = StepRates(1.0, 0.0, dispatch_s=0.5, step_s=4.0)
    found = predict([(6.0, 2), (2.0, 6)], rates)
    assert found == pytest.approx((4.0 + 0.5 * 4) / (4.0 + 6.0 + 0.5 * 6))
    assert predict([(0.0, 0), (0.0, 0)], rates) == 1.0


def test_experts_take_the_mean_of_all_ranks_whoever_has_the_tokens() -> None:
    rates = StepRates(1.0, 0.0, dispatch_s=0.5, step_s=4.0, mean_s=3.0)
    found = predict([(6.0, 2), (2.0, 6)], rates)
    assert found == pytest.approx((4.0 + 0.5 * 4 + 3 * 4) / (4 + 6.0 + 0.5 * 6 + 3 * 4))
    assert predict([(2.0, 2), (2.0, 2)], StepRates(1.0, 0.0, mean_s=9.0)) == 1.0


@pytest.mark.parametrize(("num_idle", "num_light"), [(6, 1), (14, 1), (14, 3), (30, 9)])
def test_experts_of_ranks_without_prompts_work_for_the_others(
    num_idle: int, num_light: int
) -> None:
    """Compare the choice with every scale and cap on cut prompts: it is within WORTH of the best."""
    rates = StepRates(1.3e-5, 1e-8, mean_s=2e-5)
    prompts = [
        [PromptView(60_000, 0, 60_000)],
        [PromptView(3000, 0, 0)] * num_light,
        *[[]] * num_idle,
    ]
    nominal_s = rates.chunk_s(60_000, 8192)

    def efficiency(budget_s: float, cap_tokens: int) -> float:
        taken = [cut_rank(of_rank, rates, budget_s, 8192, cap_tokens) for of_rank in prompts]
        return predict([(seconds, sum(sizes)) for sizes, seconds in taken], rates)

    best = max(efficiency(scale * nominal_s, int(cap * 8192)) for scale in SCALES for cap in CAPS)
    assert efficiency(*choose_budget(prompts, rates, nominal_s, LIMITS)) >= best - WORTH


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="mean"):
        StepLimits(10, 5)

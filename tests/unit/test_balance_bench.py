"""The prefill simulation's accounting: each token counts once, known steps have their price, and
the project's scheduler wastes less than a token budget.
"""

from __future__ import annotations

import pytest

from bench.balance_loads import Arrival, UnitReport, lognormal, mooncake
from bench.balance_prefill_sim import (
    MEAN_S,
    RATES,
    STEP_S,
    Rule,
    by_cost,
    by_tokens,
    ideal_s,
    least_cost,
    least_tokens,
    ours,
    round_robin,
    simulate,
)
from bench.shared_data import MOONCAKE
from hadal.policy.prefill_budget import StepLimits
from tests.needs import shared_data

LIMITS = StepLimits(2048, 4096)
LOAD = lognormal("test", 1500.0, 1.2, 16_000, 300, seed=3)


def test_one_prompt_on_one_rank_costs_what_the_formula_says() -> None:
    load = UnitReport("one", "", (Arrival(0.0, 100, 2000),))
    out = simulate(load, by_tokens(least_tokens), LIMITS, num_ranks=1, is_saturated=False)
    expected_s = RATES.chunk_s(100, 2000) + 2000 * (RATES.dispatch_s + MEAN_S)
    assert out.end_s == pytest.approx(expected_s + STEP_S)
    assert out.ttfts_s == pytest.approx([expected_s + STEP_S])
    assert ideal_s(load, 1) == pytest.approx(expected_s)
    assert out.efficiency == pytest.approx(expected_s / (expected_s + STEP_S))
    assert out.efficiency_free == pytest.approx(1.0)


@pytest.mark.parametrize(
    "rule",
    [
        by_tokens(round_robin()),
        by_tokens(least_tokens),
        by_tokens(None),
        by_cost(least_cost, 0.2),
        ours,
    ],
    ids=["round robin", "least tokens", "central", "least cost", "ours"],
)
def test_every_token_is_computed_once_and_every_prompt_ends(rule: Rule) -> None:
    out = simulate(LOAD, rule, LIMITS, num_ranks=8, is_saturated=False)
    assert out.num_tokens == sum(arrival.num_tokens for arrival in LOAD.arrivals)
    assert len(out.ttfts_s) == len(LOAD.arrivals)
    assert min(out.ttfts_s) > 0
    # How prompts are cut does not change the ideal time.
    assert out.ideal_s == pytest.approx(ideal_s(LOAD, 8))


def test_ours_wastes_less_than_a_token_budget() -> None:
    by_budget = simulate(LOAD, by_tokens(least_tokens), LIMITS, num_ranks=8, is_saturated=True)
    balanced = simulate(LOAD, ours, LIMITS, num_ranks=8, is_saturated=True)
    assert balanced.efficiency > by_budget.efficiency + 0.1
    assert balanced.time > by_budget.time, "its ranks' times are more nearly equal"


def test_the_mooncake_trace_is_read_with_its_prefixes() -> None:
    load = mooncake(shared_data(MOONCAKE))
    assert len(load.arrivals) == 12_031
    assert min(arrival.num_tokens for arrival in load.arrivals) >= 1
    cached = sum(arrival.num_cached for arrival in load.arrivals)
    assert 0.2 < cached / (cached + sum(arrival.num_tokens for arrival in load.arrivals)) < 0.6

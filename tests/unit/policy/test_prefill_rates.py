"""The cost of a prompt."""

from __future__ import annotations

import pytest

from hadal.core.rates import StepRates
from hadal.policy.prefill_rates import UNMEASURED, cost_s
from hadal.policy.views import PromptView

RATES = StepRates(3.3e-5, 1e-8, 2e-5)


def test_a_cached_prefix_counts_as_context() -> None:
    assert cost_s(PromptView(100, 9, 50_000), RATES) > 10 * cost_s(PromptView(100, 9, 0), RATES)


def test_pieces_of_a_prompt_cost_what_it_costs() -> None:
    whole, first, rest = (
        cost_s(prompt, UNMEASURED)
        for prompt in (PromptView(300, 9, 0), PromptView(100, 9, 0), PromptView(200, 0, 100))
    )
    assert whole > 300
    assert whole == pytest.approx(first + rest)

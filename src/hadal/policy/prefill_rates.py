"""What a prompt costs in prefill, and what is taken for its price before anything was measured.

Knows no ranks.
"""

from __future__ import annotations

from hadal.core.rates import StepRates
from hadal.policy.views import PromptView

PAIRS_PER_TOKEN = 14_800
"""Attended positions that cost as much as all else of a token: DeepSeek-V3 activates 37e9 weights,
2 FLOP each, for a token, and spends 61 layers x 128 heads x (192 + 128) x 2 FLOP on a position that
it attends to.
"""
UNMEASURED = StepRates(1.0, 1.0 / PAIRS_PER_TOKEN)
"""Before anything was measured: only the ratio is known, from the model's shape."""


def cost_s(prompt: PromptView, rates: StepRates) -> float:
    """Predicted cost of all that is left of a prompt: what its rank is chosen by."""
    return rates.chunk_s(prompt.num_context, prompt.num_tokens)

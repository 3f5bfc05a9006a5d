"""Prefill cost of a prompt, and the rates assumed before anything was measured.

Independent of ranks.
"""

from __future__ import annotations

from hadal.core.rates import StepRates
from hadal.policy.views import PromptView

PAIRS_PER_TOKEN = 14_800
"""Attended positions that cost as much as everything else of a token: per token, DeepSeek-V3
activates 37e9 weights, 2 FLOP each; per attended position it spends 61 layers x 128 heads x (192 +
128) x 2 FLOP.
"""
UNMEASURED = StepRates(1.0, 1.0 / PAIRS_PER_TOKEN)
"""Rates before anything was measured: only their ratio is known, from the model's shape."""


def cost_s(prompt: PromptView, rates: StepRates) -> float:
    """Return the predicted cost of the rest of a prompt, by which its rank is chosen."""
    return rates.chunk_s(prompt.num_context, prompt.num_tokens)

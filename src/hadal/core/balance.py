"""Names of the quantities that balancers equalise: keys of UnitReport.balance and
TracedStep.balance, and labels of the gauges.

Each value is the mean over the ranks divided by their maximum, 1 at best (DeepSeek-V3/R1 inference
overview: the load balancers' objectives). Also the names of the balancers' modes in a deployment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ATTENTION = "attention"
"""Prefill: (token, position it attends to) pairs of a step."""
TOKENS = "tokens"
"""Prefill: tokens that a rank computes in a step, and sends to experts."""
TIME = "time"
"""Prefill: predicted seconds of a step, from attention pairs and tokens at their costs."""
KV = "kv"
"""Decode: KV positions that a step reads."""
REQUESTS = "requests"
"""Decode: requests that a step computes."""
EXPERTS = "experts"
"""Tokens that a rank's experts receive in a step, mean of the MoE layers."""
EXPERTS_WORST = "experts_worst"
"""Tokens that a rank's experts receive in a step, in the least balanced MoE layer."""
OBJECTIVES = (ATTENTION, TOKENS, TIME, KV, REQUESTS, EXPERTS, EXPERTS_WORST)

AUTO, NO_MOVES, OFF, TURNS = "auto", "no_moves", "off", "turns"
"""Values of UnitsConfig.request_balance; "auto" and "off" also of UnitsConfig.expert_balance.
"turns" is round-robin over the ranks, regardless of a request's size and the ranks' load.
"""


def mean_over_max(amounts: Sequence[float]) -> float | None:
    """Return the mean divided by the maximum; None if all amounts are 0."""
    most = max(amounts, default=0.0)
    return sum(amounts) / len(amounts) / most if most > 0 else None


def balance_of(amounts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return objective -> mean over maximum, from objective -> amounts of the ranks. Objectives of
    which all amounts are 0 are left out.
    """
    found = {name: mean_over_max(of_ranks) for name, of_ranks in amounts.items()}
    return {name: value for name, value in found.items() if value is not None}


def shown(balance: Mapping[str, float]) -> dict[str, float]:
    """Return the valid entries of a unit's report in the order of OBJECTIVES: known names with
    finite numbers.
    """
    numbers = {
        name: balance[name] for name in OBJECTIVES if isinstance(balance.get(name), int | float)
    }
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}

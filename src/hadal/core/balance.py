"""What the balancers make equal, by name: keys of UnitReport.balance and TracedStep.balance, labels of
the gauges.

Each is the mean over the ranks by the maximum of the ranks, 1 at best (DeepSeek-V3/R1 inference
overview: the load balancers' objectives). Also the names by which a deployment says how far a
balancer may go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ATTENTION = "attention"
"""Prefill: (token, position it attends to) pairs of a step."""
TOKENS = "tokens"
"""Prefill: tokens of a step, which is also what a rank dispatches."""
TIME = "time"
"""Prefill: predicted seconds of a step, both of the above at what they cost."""
KV = "kv"
"""Decode: KV positions that a step reads."""
REQUESTS = "requests"
"""Decode: requests that a step computes."""
EXPERTS = "experts"
"""Tokens that a rank's experts receive in a step, mean of the MoE layers."""
EXPERTS_WORST = "experts_worst"
"""The same in the layer where it is least."""
OBJECTIVES = (ATTENTION, TOKENS, TIME, KV, REQUESTS, EXPERTS, EXPERTS_WORST)

AUTO, NO_MOVES, OFF, TURNS = "auto", "no_moves", "off", "turns"
"""What UnitsConfig.request_balance may be, and the first and third UnitsConfig.expert_balance.
"turns" is round-robin: one request to each rank in turn, whatever it is and whatever that rank has
to do.
"""


def mean_over_max(amounts: Sequence[float]) -> float | None:
    """None if there is nothing to share."""
    most = max(amounts, default=0.0)
    return sum(amounts) / len(amounts) / most if most > 0 else None


def balance_of(amounts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Objective -> the ranks' amounts, as objective -> mean over maximum; without those that nobody
    has any of.
    """
    found = {name: mean_over_max(of_ranks) for name, of_ranks in amounts.items()}
    return {name: value for name, value in found.items() if value is not None}


def shown(balance: Mapping[str, float]) -> dict[str, float]:
    """What of a unit's report can be shown, in the order of OBJECTIVES: no other names, nothing but
    finite numbers.
    """
    numbers = {
        name: balance[name] for name in OBJECTIVES if isinstance(balance.get(name), int | float)
    }
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}

"""What expert placements leave of imbalance, with the expert balancer and without: `StepModel(placed=...)`.

Measured on the loads of DeepSeek-V3's experts that SGLang published (issue 6017 there; five prefill and three decode
workloads, 58 MoE layers): mean over workloads and layers of the busiest rank over the mean, an expert's tokens split
evenly over its replicas.

    with        what policy/expert_balance makes of these very loads; groups stay on their nodes in prefill
    without     core/placement.spread (prefill: spread_by_node), which units begin with and keep where it is off

The loads have no licence file, so they are not in the repository; a test holds the table against them where they are.
"""

from __future__ import annotations

import numpy as np

from hadal.core.balance import OFF
from hadal.core.config import DECODE, PREFILL

BALANCED: dict[tuple[str, int, int], float] = {
    (PREFILL, 16, 32): 1.011, (PREFILL, 32, 32): 1.157, (PREFILL, 64, 64): 1.661, (PREFILL, 64, 0): 2.050,
    (DECODE, 32, 32): 1.000, (DECODE, 64, 64): 1.001, (DECODE, 64, 0): 1.608, (DECODE, 72, 32): 1.003,
    (DECODE, 96, 32): 1.013, (DECODE, 128, 128): 1.004, (DECODE, 128, 0): 2.981, (DECODE, 144, 32): 1.151,
    (DECODE, 160, 64): 1.031, (DECODE, 288, 32): 2.079, (DECODE, 320, 64): 1.690,
}  # fmt: skip
"""(role, ranks, redundant replicas) -> maximum over mean."""
SPREAD: dict[str, dict[int, float]] = {
    PREFILL: {8: 1.193, 16: 1.599, 32: 2.089, 64: 2.825},
    DECODE: {
        8: 1.172, 16: 1.363, 32: 1.656, 64: 2.226, 72: 2.393, 96: 2.866, 128: 3.355, 144: 3.721, 160: 3.969, 288: 6.433,
    },
}  # fmt: skip
"""role -> ranks -> the same. Replicas hardly matter, for nobody knows whose they should be."""


def placed(role: str, num_ranks: int, num_redundant: int, expert_balance: str) -> float | None:
    """Maximum over mean that a unit's placement leaves over a whole run.

    With the balancer, of sizes that were measured; None of others: the step model has its own guess. Without it between
    sizes, too: log-linear in ranks, and beyond them the outermost, as a lower bound.
    """
    if expert_balance != OFF:
        return BALANCED.get((role, num_ranks, num_redundant))
    if num_ranks == 1:
        return 1.0
    ranks, values = (np.log(list(column)) for column in zip(*SPREAD[role].items(), strict=True))
    return float(np.exp(np.interp(np.log(num_ranks), ranks, values)))

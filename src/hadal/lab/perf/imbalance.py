"""Expected imbalance of ranks by chance: ratio of the busiest rank's load to the mean.

All ranks wait for the busiest one in every layer. So the relevant figure is the mean over layers of
(maximum over mean), at the size of one micro-batch. Does not depend on times.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist


@lru_cache(maxsize=1024)
def expected_maximum(num_ranks: int) -> float:
    """Return the mean maximum of standard normals (Blom 1958): 2.07 for 32 ranks, 2.62 for 144."""
    if num_ranks <= 1:
        return 0.0
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def expected_imbalance(
    num_ranks: int,
    mean_rows: float,
    *,
    placed: float = 1.0,
    num_texts: float = math.inf,
    expert_slots_per_rank: float = 1.0,
    affinity: float = 0.0,
) -> float:
    """Return the expected maximum over mean of the rows per rank, in one layer of one micro-batch.

    `mean_rows`: (token, expert) pairs per rank, assigned at random: relative variance (1 - 1 /
    `num_ranks`) / `mean_rows`. `num_texts`: texts in the unit's micro-batch. Tokens of one text
    prefer the same experts, with relative deviation `affinity`, which averages out over texts and a
    rank's expert slots. `placed`: imbalance that the placement leaves over a whole run (1 is
    perfect). The result is at most `num_ranks`: all rows on one rank.
    """
    if num_ranks <= 1 or mean_rows <= 0.0:
        return 1.0
    variance = (1.0 - 1.0 / num_ranks) / mean_rows
    if affinity > 0.0 and num_texts < math.inf:
        variance += affinity * affinity / (max(num_texts, 1e-9) * max(expert_slots_per_rank, 1.0))
    return min(float(num_ranks), placed * (1.0 + expected_maximum(num_ranks) * math.sqrt(variance)))

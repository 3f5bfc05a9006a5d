"""How much more the busiest rank gets than the mean: measured from loads and a placement, or
expected from chance.

All ranks wait for the busiest one in every layer, so what counts is the mean over layers of
(maximum over mean), at the size of one micro-batch. Knows no times.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike


@lru_cache(maxsize=1024)
def expected_maximum(num_ranks: int) -> float:
    """Of `num_ranks` standard normals (Blom 1958): 2.07 for 32, 2.64 for 144."""
    if num_ranks <= 1:
        return 0.0
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def expected_imbalance(
    num_ranks: int,
    mean_rows: float,
    *,
    placed: float = 1.0,
    num_texts: float = math.inf,
    slots_per_rank: float = 1.0,
    affinity: float = 0.0,
) -> float:
    """Expected maximum over mean of the rows that ranks receive in one layer of one micro-batch.

    `mean_rows` (token, expert) pairs a rank are thrown at random: their share has variance 1/rows.
    Tokens of one text like the same experts: `num_texts` texts in the micro-batch of the whole
    unit, each with relative deviation `affinity` over experts, spread over a rank's slots. `placed`
    is what the placement leaves over a whole run (1 is perfect). Never more than all rows on one
    rank.
    """
    if num_ranks <= 1 or mean_rows <= 0.0:
        return 1.0
    variance = (1.0 - 1.0 / num_ranks) / mean_rows
    if affinity > 0.0 and num_texts < math.inf:
        variance += affinity * affinity / (max(num_texts, 1e-9) * max(slots_per_rank, 1.0))
    return min(float(num_ranks), placed * (1.0 + expected_maximum(num_ranks) * math.sqrt(variance)))


def measured_imbalance(loads_LE: ArrayLike, slot_to_expert_LRS: ArrayLike) -> float:
    """Mean over layers of maximum over mean of what ranks receive, an expert's tokens split evenly
    over its replicas.

    loads_LE: tokens [layers, experts]; slot_to_expert_LRS: expert ids [layers, ranks, slots],
    negative: an empty slot. Raises ValueError where shapes do not fit or an expert with tokens has
    no replica.
    """
    loads = np.asarray(loads_LE, np.float64)
    slots = np.asarray(slot_to_expert_LRS, np.int64)
    if loads.ndim != 2 or slots.ndim != 3 or len(loads) != len(slots):
        raise ValueError(
            f"loads {loads.shape} and slots {slots.shape}: [layers, experts] and [layers, ranks,"
            " slots] are needed."
        )
    if slots.size and slots.max() >= loads.shape[1]:
        raise ValueError(f"a slot holds expert {slots.max()}, loads are of {loads.shape[1]}.")
    if np.any(loads < 0.0):
        raise ValueError("a load is negative.")
    ratios = []
    for load, held in zip(loads, slots, strict=True):
        if load.sum() <= 0.0:
            continue
        counts = np.bincount(held[held >= 0], minlength=len(load))
        if np.any((counts == 0) & (load > 0.0)):
            raise ValueError(
                f"expert {int(np.argmax((counts == 0) & (load > 0.0)))} has tokens and no replica."
            )
        share = np.append(load / np.maximum(counts, 1), 0.0)
        received = share[np.where(held >= 0, held, -1)].sum(axis=1)
        ratios.append(received.max() / received.mean())
    return float(np.mean(ratios)) if ratios else 1.0

"""Place experts on interchangeable ranks: replicas, packing, then exchanges up to a ceiling.

Independent of nodes, of today's placement and of time. All layers at once.

Shapes: L layers, E logical experts, R living ranks, S maximum expert slots of a rank.
"""

from __future__ import annotations

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.core.placement import EMPTY
from hadal.policy.experts.exchange import exchange
from hadal.policy.experts.greedy import expand, fold, pack, replicate, without_doubles
from hadal.policy.experts.pair_counts import choose_counts
from hadal.policy.experts.tables import heaviest_rank


def place_flat(loads_LE: Floats, capacity_R: Ints, ceiling_L: Floats, *, num_rounds: int) -> Ints:
    """Return the expert in every expert slot [L, R, S]; `num_rounds` 0: by the plain greedy, which
    is as good as EPLB.

    Exchanges in a layer end when its heaviest rank is at or below its ceiling. The
    result is never worse than the greedy's. Raises ValueError if there are fewer slots than experts.
    """
    num_experts = loads_LE.shape[1]
    num_ranks = len(capacity_R)
    capacity = np.minimum(capacity_R, num_experts)  # Further slots would only hold an expert twice.
    num_replicas = int(capacity.sum())
    if num_replicas < num_experts:
        raise ValueError(f"{num_replicas} slots are too few for {num_experts} experts.")
    two_each = bool((capacity == 2).all())
    counts, _ = replicate(loads_LE, num_replicas, num_ranks)
    greedy = _packed(loads_LE, counts, capacity, two_each)
    if not num_rounds or int(capacity.max()) < 2:
        return greedy
    if not two_each:
        return exchange(greedy, loads_LE, ceiling_L, num_rounds=num_rounds)
    counts = choose_counts(
        loads_LE, num_replicas, num_ranks, num_rounds=6 if num_replicas - num_experts <= 64 else 1
    )
    table = _packed(loads_LE, counts, capacity, two_each)
    worse = heaviest_rank(table, loads_LE) > heaviest_rank(greedy, loads_LE)
    table[worse] = greedy[worse]
    return table


def _packed(loads_LE: Floats, counts_LE: Ints, capacity_R: Ints, two_each: bool) -> Ints:
    experts, shares = expand(loads_LE, counts_LE)
    table = fold(experts) if two_each else pack(experts, shares, capacity_R)
    return without_doubles(table, loads_LE)


def widened(table_LRS: Ints, num_expert_slots: int) -> Ints:
    """Return the table with empty expert slots added to every rank until it has `num_expert_slots`."""
    extra = num_expert_slots - table_LRS.shape[2]
    return np.pad(table_LRS, ((0, 0), (0, 0), (0, extra)), constant_values=EMPTY)

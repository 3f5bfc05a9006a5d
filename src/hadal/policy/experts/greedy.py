"""Choose each expert's replica count and ranks: the greedy start of every expert placement.

Independent of nodes, of today's placement and of time. All layers are planned at once: an array's
first axis is the layer, and a step of a loop is one numpy call for all of them.

Shapes: L layers, E logical experts, R living ranks, S maximum expert slots of a rank, P slots of
all ranks together.
"""

from __future__ import annotations

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.core.placement import EMPTY

FULL = 1e30
"""Key of a rank without free slots; far above any load, since loads are normalised to about 1."""


def replicate(loads_LE: Floats, num_replicas: int, num_ranks: int) -> tuple[Ints, Ints]:
    """Return (replicas [L, E], the expert of each extra replica in order of assignment [L,
    num_replicas - E]).

    Each extra replica goes to the expert with the heaviest replicas, as in DeepSeek's EPLB; that
    minimises the heaviest replica. No expert gets more replicas than there are ranks.
    """
    num_layers, num_experts = loads_LE.shape
    counts_LE = np.ones((num_layers, num_experts), np.int64)
    num_extra = num_replicas - num_experts
    given = np.empty((num_layers, num_extra), np.int64)
    share = loads_LE.copy()
    rows = np.arange(num_layers)
    for index in range(num_extra):
        best = np.argmax(share, axis=1)
        given[:, index] = best
        count = counts_LE[rows, best] + 1
        counts_LE[rows, best] = count
        share[rows, best] = np.where(count < num_ranks, loads_LE[rows, best] / count, -1.0)
    return counts_LE, given


def expand(loads_LE: Floats, counts_LE: Ints) -> tuple[Ints, Floats]:
    """Return (expert [L, P], load [L, P]) of every replica, heaviest first; replicas of one expert
    are adjacent.
    """
    num_layers, num_experts = loads_LE.shape
    share = loads_LE / counts_LE
    order = np.argsort(-share, axis=1, kind="stable")
    flat = (order + np.arange(num_layers)[:, None] * num_experts).ravel()
    experts = np.repeat(flat, counts_LE.ravel()[flat]).reshape(num_layers, -1)
    return experts % num_experts, share.ravel()[experts]


def pack(experts_LP: Ints, shares_LP: Floats, capacity_R: Ints) -> Ints:
    """Return the expert in every expert slot [L, R, S]: heaviest replica first, each on the least
    loaded rank with a free slot.

    A rank that holds the expert is skipped while another rank has a free slot. `capacity_R` sums to
    P and has no 0.
    """
    num_layers, num_replicas = experts_LP.shape
    num_ranks, num_expert_slots = len(capacity_R), int(capacity_R.max())
    table = np.full((num_layers, num_ranks, num_expert_slots), EMPTY, np.int64)
    # The first R replicas go to empty ranks: one each.
    table[:, :, 0] = experts_LP[:, :num_ranks]
    flat = table.reshape(-1)
    key = shares_LP[:, :num_ranks].copy()
    key[:, capacity_R == 1] = FULL
    last = experts_LP[:, :num_ranks].ravel()
    used = np.ones(num_layers * num_ranks, np.int64)
    capacity = np.tile(capacity_R, num_layers)
    base = np.arange(num_layers) * num_ranks
    flat_key = key.reshape(-1)
    again = np.zeros(num_replicas, bool)
    again[1:] = (experts_LP[:, 1:] == experts_LP[:, :-1]).any(axis=0)
    experts_PL, shares_PL = np.ascontiguousarray(experts_LP.T), np.ascontiguousarray(shares_LP.T)
    for index in range(num_ranks, num_replicas):
        expert = experts_PL[index]
        if again[index]:
            # Replicas of an expert are adjacent, so a rank that holds this one took it last.
            held = last.reshape(num_layers, num_ranks) == expert[:, None]
            at = np.argmin(key + held * (FULL / 2), axis=1) + base
        else:
            at = key.argmin(axis=1) + base
        count = used[at]
        flat[at * num_expert_slots + count] = expert
        used[at] = count + 1
        last[at] = expert
        flat_key[at] += shares_PL[index]
        flat_key[at[count + 1 == capacity[at]]] = FULL
    return table


def fold(experts_LP: Ints) -> Ints:
    """Return the experts of ranks with two expert slots [L, R, 2]: the k-th heaviest replica with
    the k-th lightest, which is optimal for given replicas.
    """
    num_ranks = experts_LP.shape[1] // 2
    return np.stack((experts_LP[:, :num_ranks], experts_LP[:, : num_ranks - 1 : -1]), axis=2)


def without_doubles(table_LRS: Ints, loads_LE: Floats) -> Ints:
    """Remove duplicates: where a rank holds an expert twice, swap one replica with another rank's,
    or give its slot to another expert.

    Changes the table in place and returns it. Succeeds whenever no rank has more expert slots than
    there are experts.
    """
    ordered = np.sort(table_LRS, axis=2)
    doubled = ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY)).any(axis=2)
    for layer, rank in np.argwhere(doubled):
        table = table_LRS[layer]
        for slot in range(table.shape[1]):
            expert = table[rank, slot]
            if expert != EMPTY and np.count_nonzero(table[rank] == expert) > 1:
                _undouble(table, int(rank), slot, loads_LE[layer])
    return table_LRS


def _undouble(table_RS: Ints, rank: int, slot: int, loads_E: Floats) -> None:
    """Replace one replica of an expert that its rank holds twice, by the swap that changes loads
    least; if there is none, by a replica of the heaviest expert that it lacks.
    """
    expert = table_RS[rank, slot]
    counts = np.bincount(table_RS[table_RS != EMPTY], minlength=len(loads_E))
    share = loads_E / np.maximum(counts, 1)
    here = np.isin(table_RS, table_RS[rank]) | (table_RS == EMPTY)
    here |= (table_RS == expert).any(axis=1)[:, None]
    if not here.all():
        distance = np.where(here, np.inf, np.abs(share[table_RS] - share[expert]))
        other = np.unravel_index(int(np.argmin(distance)), table_RS.shape)
        table_RS[rank, slot], table_RS[other] = table_RS[other], expert
        return
    share[table_RS[rank][table_RS[rank] != EMPTY]] = -1.0
    if share.max() >= 0:
        table_RS[rank, slot] = int(np.argmax(share))

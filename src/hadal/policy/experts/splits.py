"""Split experts unevenly over their replicas: better balance with no replica moved.

The rank loads that splits can reach form a flow polytope. On it, the split with the least sum of
squares also has the least maximum. Levelling one expert at a time descends that sum, so a few
sweeps come close to the optimum. All layers are computed together; nodes and time are not considered.

Shapes: L layers, E logical experts, R ranks, S expert slots of a rank, K maximum number of
replicated experts in a layer, M maximum number of replicas of an expert.
"""

from __future__ import annotations

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.core.placement import EMPTY
from hadal.policy.experts.tables import held_loads, shares_of

NOWHERE = 1e30
"""Load of the dummy rank that pads an expert's slots."""
STILL = 2e-5
"""Smallest relative decrease of the heaviest rank's load that justifies another sweep."""


def split_loads(table_LRS: Ints, loads_LE: Floats, *, num_sweeps: int = 12) -> Floats:
    """Return the fraction of its expert's tokens that every expert slot takes [L, R, S]; 0 for
    empty ones.

    The fractions of an expert sum to 1. Each sweep gives every replicated expert the split that
    levels its ranks, with the other experts fixed. The heaviest rank never ends heavier than with
    even splits.
    """
    num_layers, _, num_expert_slots = table_LRS.shape
    num_experts = loads_LE.shape[1]
    amounts = shares_of(table_LRS, loads_LE)
    even = amounts.copy()
    rank_loads = amounts.sum(axis=2)
    groups = _replicated(table_LRS, num_experts)
    flat = np.concatenate((amounts.reshape(num_layers, -1), np.zeros((num_layers, 1))), axis=1)
    rows = np.arange(num_layers)[:, None]
    # Padding points to the last column of `flat`, on a dummy rank.
    padded = [(np.where(slots < 0, flat.shape[1] - 1, slots), slots >= 0) for slots in groups]
    ranks = [np.where(real, at // num_expert_slots, rank_loads.shape[1]) for at, real in padded]
    heights = np.concatenate((rank_loads, np.full((num_layers, 1), NOWHERE)), axis=1)
    heaviest = rank_loads.max(axis=1)
    for sweep in range(num_sweeps):
        for (at, real), rank in zip(padded, ranks, strict=True):
            mine = flat[rows, at]
            others = heights[rows, rank] - mine
            wanted = _level(others, mine.sum(axis=1))
            flat[rows, at] = wanted
            heights[rows, rank] = np.where(real, others + wanted, NOWHERE)
        before, heaviest = heaviest, heights[:, :-1].max(axis=1)
        if sweep and (before - heaviest).max() <= STILL * heaviest.max():
            break
    amounts = flat[:, :-1].reshape(table_LRS.shape)
    worse = amounts.sum(axis=2).max(axis=1) > even.sum(axis=2).max(axis=1)
    amounts[worse] = even[worse]
    return _fractions(table_LRS, amounts, loads_LE)


def _replicated(table_LRS: Ints, num_experts: int) -> list[Ints]:
    """Return K arrays [L, M]: the k-th has the ids of the expert slots of every layer's k-th
    replicated expert, padded with -1.
    """
    found: list[list[list[int]]] = []
    for table in table_LRS.reshape(len(table_LRS), -1):
        counts = np.bincount(table[table != EMPTY], minlength=num_experts)
        order = np.argsort(np.where(table == EMPTY, num_experts, table), kind="stable")
        first = np.concatenate(([0], np.cumsum(counts)))
        found.append([order[first[e] : first[e + 1]].tolist() for e in np.flatnonzero(counts > 1)])
    most = max((len(slots) for layer in found for slots in layer), default=0)
    groups = []
    for index in range(max(map(len, found), default=0)):
        group = np.full((len(found), most), -1)
        for layer, experts in enumerate(found):
            if index < len(experts):
                group[layer, : len(experts[index])] = experts[index]
        groups.append(group)
    return groups


def _level(others_LM: Floats, amount_L: Floats) -> Floats:
    """Return the split of an amount over ranks that levels those it reaches (water-filling); a rank
    at NOWHERE takes nothing.
    """
    height = np.sort(others_LM, axis=1)
    # Level over the lowest rank alone, over the two lowest, and so on; it falls until the next rank
    # stands above it.
    level = (height.cumsum(axis=1) + amount_L[:, None]) / np.arange(1, others_LM.shape[1] + 1)
    poured = np.maximum(level.min(axis=1, keepdims=True) - others_LM, 0.0)
    total = poured.sum(axis=1)
    result: Floats = poured * (amount_L / np.where(total > 0, total, 1.0))[:, None]
    return result


def _fractions(table_LRS: Ints, amounts_LRS: Floats, loads_LE: Floats) -> Floats:
    """Return amounts as fractions of their expert's load; even fractions for an expert without load."""
    ones = shares_of(table_LRS, np.ones_like(loads_LE))
    load = held_loads(table_LRS, loads_LE)
    result: Floats = np.where(
        (load > 0) & (table_LRS != EMPTY), amounts_LRS / np.where(load > 0, load, 1.0), ones
    )
    return result

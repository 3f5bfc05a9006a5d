"""Choose replica counts for ranks of two expert slots, where the counts and not the packing limit
the balance.

With two expert slots, folding (heaviest replica with the lightest) is optimal for given counts, so
one sort evaluates counts. The greedy splits the heaviest experts. Often it is better to leave
middling experts whole and split the *lightest* instead, so that every heavy replica gets a tiny
partner. Independent of rank ids. All layers at once.

Shapes: L layers, E logical experts, P replicas (2 per rank), X extra replicas (P - E).
"""

from __future__ import annotations

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.policy.experts.greedy import expand, replicate
from hadal.policy.experts.tables import Singles


def heaviest_pair(loads_LE: Singles, counts_LE: Ints) -> Singles:
    """Return the load of the heaviest rank [L] after folding. Single precision: it sorts faster."""
    counts = counts_LE.ravel()
    shares = np.repeat(loads_LE.ravel() / counts.astype(np.float32), counts).reshape(
        len(loads_LE), -1
    )
    shares.sort(axis=1)
    half = shares.shape[1] // 2
    result: Singles = (shares[:, :half] + shares[:, : half - 1 : -1]).max(axis=1)
    return result


def choose_counts(loads_LE: Floats, num_replicas: int, num_ranks: int, *, num_rounds: int) -> Ints:
    """Return replicas [L, E] with a folded heaviest rank no heavier than the greedy's.

    First, every k with 1 <= X - k <= E/2 is tried: the greedy's first k extra replicas, and one for
    each of the X - k lightest experts. Then each of `num_rounds` rounds makes the best move of one
    replica from an expert to another.
    """
    num_layers, num_experts = loads_LE.shape
    counts, given = replicate(loads_LE, num_replicas, num_ranks)
    loads = loads_LE.astype(np.float32)
    best = heaviest_pair(loads, counts)
    lightest = np.argsort(loads_LE, axis=1, kind="stable")
    num_extra = num_replicas - num_experts
    rows = np.arange(num_layers)[:, None]
    for num_light in range(1, min(num_extra, num_experts // 2) + 1):
        trial = np.ones_like(counts)
        np.add.at(trial, (rows, given[:, : num_extra - num_light]), 1)
        np.add.at(trial, (rows, lightest[:, :num_light]), 1)
        worth = heaviest_pair(loads, trial)
        better = (worth < best * (1 - 1e-6)) & (trial.max(axis=1) <= num_ranks)
        counts[better], best[better] = trial[better], worth[better]
    for _ in range(num_rounds):
        if not improve_counts(loads, counts, best, num_ranks):
            break
    return counts


def improve_counts(loads_LE: Singles, counts_LE: Ints, best_L: Singles, num_ranks: int) -> bool:
    """Move one replica per layer in place, if that lightens the heaviest pair: from any split
    expert to one of that pair or of the two lightest whole experts. Return True if any layer
    improved.
    """
    num_layers = len(loads_LE)
    experts, shares = expand(loads_LE.astype(np.float64), counts_LE)
    half = shares.shape[1] // 2
    rows = np.arange(num_layers)
    worst = np.argmax(shares[:, :half] + shares[:, : half - 1 : -1], axis=1)
    heavy = experts[rows, worst]
    partner = experts[rows, shares.shape[1] - 1 - worst]
    whole = np.where(counts_LE == 1, loads_LE, np.inf)
    lightest = np.argpartition(whole, 1, axis=1)[:, :2]
    takers = np.stack((heavy, partner, lightest[:, 0], lightest[:, 1]), axis=1)
    split = np.where(counts_LE > 1, loads_LE / np.maximum(counts_LE - 1, 1), np.inf)
    givers = np.argsort(split, axis=1, kind="stable")
    num_givers = int((counts_LE > 1).sum(axis=1).max())
    found = best_L.copy()
    chosen = np.full((num_layers, 2), -1)
    for taker_index in range(takers.shape[1]):
        taker = takers[:, taker_index]
        giver = givers[:, :num_givers]
        can = (
            (counts_LE[rows[:, None], giver] > 1)
            & (giver != taker[:, None])
            & (counts_LE[rows, taker] < num_ranks)[:, None]
            & (split[rows[:, None], giver] < found[:, None])
        )
        layer, index = np.nonzero(can)
        if not len(layer):
            continue
        trial = counts_LE[layer]
        each = np.arange(len(layer))
        trial[each, giver[layer, index]] -= 1
        trial[each, taker[layer]] += 1
        worth = np.full(can.shape, np.inf, np.float32)
        worth[layer, index] = heaviest_pair(loads_LE[layer], trial)
        best = worth.argmin(axis=1)
        hit = np.flatnonzero(worth[rows, best] < found * (1 - 1e-6))
        found[hit] = worth[hit, best[hit]]
        chosen[hit, 0], chosen[hit, 1] = giver[hit, best[hit]], taker[hit]
    hit = np.flatnonzero(chosen[:, 0] >= 0)
    counts_LE[hit, chosen[hit, 0]] -= 1
    counts_LE[hit, chosen[hit, 1]] += 1
    best_L[hit] = found[hit]
    return bool(len(hit))

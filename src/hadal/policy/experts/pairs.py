"""Improve placements near today's for ranks of two expert slots, where single moves soon find
nothing more.

With two expert slots, trades alone reach the fold, the best pairing for given replica counts. So
the counts change first: to the greedy's counts for the new loads, then one replica at a time from
one expert to another, even if a rank becomes heavier at first. Trades then repair the pairing; a
layer that ends no better is restored. Independent of nodes and time. All layers at once.

Shapes: L layers, E logical experts, R living ranks, S = 2 expert slots of a rank.
"""

from __future__ import annotations

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.policy.experts.greedy import replicate
from hadal.policy.experts.increment import Homes, descend
from hadal.policy.experts.pair_counts import heaviest_pair, improve_counts
from hadal.policy.experts.paths import choose, standing
from hadal.policy.experts.tables import heaviest_rank, held_by, num_moved

WORTHWHILE = 1e-3
"""Minimum decrease of the heaviest pair by moving a replica to another expert, as a fraction of its load."""
MOVES_A_PASS = 6
"""Estimated moves for changing one replica's expert and repairing the pairing."""


def improve_pairs(
    table_LRS: Ints,
    loads_LE: Floats,
    ceiling_L: Floats,
    capacity_R: Ints,
    *,
    max_moves: int,
    num_passes: int = 8,
) -> Ints:
    """Return a table [L, R, 2] no heavier in any layer, at most `max_moves` replicas away from the
    given one.

    No expert slot of the given table is empty.
    """
    num_layers, num_ranks, _ = table_LRS.shape
    stay = standing(table_LRS, loads_LE, np.zeros(num_layers, np.int64))
    counts, _ = replicate(loads_LE, 2 * num_ranks, num_ranks)
    homes = held_by(table_LRS, loads_LE.shape[1])
    counted = with_counts(table_LRS, loads_LE, counts)
    paths = [
        stay,
        descend(
            counted,
            Homes(homes),
            loads_LE,
            ceiling_L,
            capacity_R,
            max_moves=max_moves,
            trades_only=True,
        ),
    ]
    best = choose(paths, max_moves).reshape(table_LRS.shape)
    open_layers = np.arange(num_layers)
    for _ in range(num_passes):
        open_layers = open_layers[
            heaviest_rank(best, loads_LE)[open_layers] > ceiling_L[open_layers]
        ]
        moved = num_moved(table_LRS, best)
        left = max_moves - int(moved.sum())
        if not len(open_layers) or left < MOVES_A_PASS:
            break
        loads = loads_LE[open_layers].astype(np.float32)
        before = _counts(best[open_layers], loads_LE.shape[1])
        after, pairs = before.copy(), heaviest_pair(loads, before)
        heaviest = pairs.copy()
        improve_counts(loads, after, pairs, num_ranks)
        gain = heaviest - pairs
        chosen = np.argsort(-gain, kind="stable")
        chosen = chosen[gain[chosen] > WORTHWHILE * heaviest[chosen]]
        layers = open_layers[chosen]
        if not len(layers):
            break
        trial = best[layers]
        for index, row in enumerate(chosen):
            change = after[row] - before[row]
            _pass_on(
                trial[index], loads_LE[layers[index]], int(change.argmin()), int(change.argmax())
            )
        stay = standing(best[layers], loads_LE[layers], moved[layers])
        path = descend(
            trial,
            Homes(homes[layers]),
            loads_LE[layers],
            ceiling_L[layers],
            capacity_R,
            max_moves=max_moves,
            trades_only=True,
        )
        new = choose([stay, path], left + int(moved[layers].sum())).reshape(trial.shape)
        better = heaviest_rank(new, loads_LE[layers]) < heaviest_rank(
            best[layers], loads_LE[layers]
        ) * (1 - 1e-6)
        best[layers] = new
        # Layers that were not chosen gain too little to spend the rest of the budget on.
        open_layers = layers[better]
    return best


def with_counts(table_LRS: Ints, loads_LE: Floats, counts_LE: Ints) -> Ints:
    """Return the table with these replica counts, as far as no rank then has an expert twice."""
    table = table_LRS.copy()
    changes = counts_LE - _counts(table, loads_LE.shape[1])
    for layer, change in enumerate(changes):
        while change.max() > 0:
            taker = int(np.argmax(np.where(change > 0, loads_LE[layer], -1.0)))
            giver = int(np.argmin(np.where(change < 0, loads_LE[layer], np.inf)))
            _pass_on(table[layer], loads_LE[layer], giver, taker)
            change[giver] += 1
            change[taker] -= 1
    return table


def _pass_on(table_RS: Ints, loads_E: Floats, giver: int, taker: int) -> None:
    """Give a slot of expert `giver` to expert `taker`, on the rank that is lightest afterwards."""
    slots = np.argwhere(table_RS == giver)
    others = table_RS[slots[:, 0], 1 - slots[:, 1]]
    can = np.flatnonzero(others != taker)
    if not len(can):
        return
    counts = [np.count_nonzero(table_RS == expert) for expert in others[can]]
    rank, slot = slots[can[int(np.argmin(loads_E[others[can]] / counts))]]
    table_RS[rank, slot] = taker


def _counts(table_LRS: Ints, num_experts: int) -> Ints:
    rows = np.arange(len(table_LRS))[:, None, None] * num_experts
    return np.bincount((table_LRS + rows).ravel(), minlength=len(table_LRS) * num_experts).reshape(
        -1, num_experts
    )

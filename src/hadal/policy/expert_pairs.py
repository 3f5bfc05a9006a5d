"""Expert placements near today's for ranks of two slots, where single moves soon find nothing more.

With two slots, trades alone reach the fold, the best pairing for the replica counts there are. To get past it, a
replica passes from one expert to another even where that makes a rank heavier at first; trades then repair the
pairing, and a layer that ends no better goes back to what it was.
Knows nothing of nodes or time. All layers at once.

Shapes: L layers, E logical experts, R living ranks, S = 2 slots of a rank.
"""

from __future__ import annotations

import numpy as np

from hadal.policy.expert_counts import heaviest_pair, improve_counts
from hadal.policy.expert_increment import improve
from hadal.policy.expert_packing import EMPTY, Floats, Ints
from hadal.policy.expert_search import shares_of

MOVES_A_PASS = 6
"""What passing a replica on and repairing the pairing is reckoned to move."""


def improve_pairs(
    table_LRS: Ints, loads_LE: Floats, ceiling_L: Floats, capacity_R: Ints, *, max_moves: int, num_passes: int = 20
) -> Ints:
    """Return a table [L, R, 2] no heavier in any layer, at most `max_moves` replicas away from the given one."""
    best = improve(table_LRS, loads_LE, ceiling_L, capacity_R, max_moves=max_moves)
    num_ranks = table_LRS.shape[1]
    open_layers = np.flatnonzero((best != EMPTY).all(axis=(1, 2)))
    for _ in range(num_passes):
        open_layers = open_layers[_tops(best, loads_LE)[open_layers] > ceiling_L[open_layers]]
        left = max_moves - _num_moved(table_LRS, best)
        if not len(open_layers) or left < MOVES_A_PASS:
            break
        loads = loads_LE[open_layers].astype(np.float32)
        before = _counts(best[open_layers], loads_LE.shape[1])
        after, pairs = before.copy(), heaviest_pair(loads, before)
        heaviest = pairs.copy()
        improve_counts(loads, after, pairs, num_ranks)
        gain = heaviest - pairs
        chosen = np.argsort(-gain, kind="stable")
        chosen = chosen[gain[chosen] > 0][: left // MOVES_A_PASS]
        layers = open_layers[chosen]
        if not len(layers):
            break
        trial = best[layers]
        for index, row in enumerate(chosen):
            _pass_on(trial[index], loads_LE[layers[index]], after[row] - before[row])
        left -= _num_moved(best[layers], trial)
        trial = improve(trial, loads_LE[layers], ceiling_L[layers], capacity_R, max_moves=left, trades_only=True)
        better = _tops(trial, loads_LE[layers]) < _tops(best[layers], loads_LE[layers]) * (1 - 1e-6)
        best[layers[better]] = trial[better]
        # A layer that was not chosen had too little to gain for the budget left.
        open_layers = layers[better]
    return best


def _pass_on(table_RS: Ints, loads_E: Floats, change_E: Ints) -> None:
    """Give a slot of the expert that loses a replica to the one that gains it, on the rank that is then lightest."""
    giver, taker = int(change_E.argmin()), int(change_E.argmax())
    can = (table_RS == giver) & ~(table_RS == taker).any(axis=1)[:, None]
    if change_E[giver] >= 0 or not can.any():
        return
    other_LR = shares_of(table_RS[None], loads_E[None])[0].sum(axis=1)
    at = np.unravel_index(int(np.argmin(np.where(can, other_LR[:, None], np.inf))), table_RS.shape)
    table_RS[at] = taker


def _tops(table_LRS: Ints, loads_LE: Floats) -> Floats:
    return np.asarray(shares_of(table_LRS, loads_LE).sum(axis=2).max(axis=1))


def _counts(table_LRS: Ints, num_experts: int) -> Ints:
    rows = np.arange(len(table_LRS))[:, None, None] * num_experts
    return np.bincount((table_LRS + rows).ravel(), minlength=len(table_LRS) * num_experts).reshape(-1, num_experts)


def _num_moved(old_LRS: Ints, new_LRS: Ints) -> int:
    """Replicas that their rank did not hold before."""
    return int(((new_LRS[:, :, :, None] != old_LRS[:, :, None, :]).all(axis=3) & (new_LRS != EMPTY)).sum())

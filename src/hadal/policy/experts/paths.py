"""Paths of placements, each one move from the one before, and the choice of each layer's table
within a budget of moves.

Independent of nodes, of time, and of how a path was found.

Shapes: N tables, L layers, E logical experts, R living ranks, S maximum expert slots of a
rank, Q = R * S expert slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats, Ints
from hadal.policy.experts.tables import Singles, heaviest_rank


@dataclass(frozen=True)
class Path:
    """Sequence of tables for every layer, each one move from the one before, from its start."""

    tables_NLQ: NDArray[np.int16]
    tops_NL: Singles
    """Load of the heaviest rank."""
    distances_NL: Ints
    """Number of replicas away from home."""


def standing(table_LRS: Ints, loads_LE: Floats, distance_L: Ints) -> Path:
    """Return a path of one table, without moves; `distance_L`: its replicas away from home."""
    tables = table_LRS.reshape(1, len(table_LRS), -1).astype(np.int16)
    return Path(
        tables, heaviest_rank(table_LRS, loads_LE).astype(np.float32)[None], distance_L[None]
    )


def choose(paths: Sequence[Path], max_moves: int) -> Ints:
    """Return tables [L, Q], one per layer, with the greatest sum of mean/max within the budget."""
    tops = np.concatenate([path.tops_NL for path in paths])
    distances = np.concatenate([path.distances_NL for path in paths])
    tables = np.concatenate([path.tables_NLQ for path in paths])
    return tables[_within(tops, distances, max_moves), np.arange(tops.shape[1])].astype(np.int64)


def _within(tops_NL: Singles, distances_NL: Ints, max_moves: int) -> Ints:
    """Return the index of the table that each layer takes [L].

    The price of a replica (the gain that it must bring) is bisected; the rest of the budget goes to the
    worst layers first. No layer ends heavier than in its first table.
    """
    values = np.where(tops_NL > tops_NL[0], -1.0, 1.0 / np.maximum(tops_NL, 1e-9))
    columns = np.arange(tops_NL.shape[1])
    best = np.zeros(tops_NL.shape[1], np.int64)
    low, high = 0.0, 1.0
    for step in range(24):
        price = 1e-9 if not step else (low + high) / 2
        chosen = (values - price * distances_NL).argmax(axis=0)
        if distances_NL[chosen, columns].sum() <= max_moves:
            best, high = chosen, price
            if not step:
                break
        else:
            low = price
    left = max_moves - int(distances_NL[best, columns].sum())
    for layer in np.argsort(values[best, columns], kind="stable"):
        can = distances_NL[:, layer] <= distances_NL[best[layer], layer] + left
        found = int(np.where(can, values[:, layer], -1.0).argmax())
        if values[found, layer] > values[best[layer], layer]:
            left -= int(distances_NL[found, layer] - distances_NL[best[layer], layer])
            best[layer] = found
    return best

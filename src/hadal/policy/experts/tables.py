"""Tables of experts by expert slot: loads of slots and ranks, and replicas moved between two
tables.

Independent of nodes, time and how a table was found. All layers at once: an array's first axis is
the layer.

Shapes: L layers, E logical experts, R living ranks, S maximum expert slots of a rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Bools, Floats, Ints
from hadal.core.placement import EMPTY

Singles = NDArray[np.float32]


def shares_of(table_LRS: Ints, loads_LE: Floats) -> Floats:
    """Return the load of the replica in every expert slot [L, R, S] when the replicas of an expert
    share evenly; 0 in empty ones.
    """
    num_layers, num_experts = loads_LE.shape
    flat = table_LRS.reshape(num_layers, -1)
    at = np.where(flat == EMPTY, num_experts, flat) + np.arange(num_layers)[:, None] * (
        num_experts + 1
    )
    counts = np.bincount(at.ravel(), minlength=num_layers * (num_experts + 1)).reshape(
        num_layers, -1
    )
    share = np.zeros((num_layers, num_experts + 1))
    share[:, :num_experts] = loads_LE / np.maximum(counts[:, :num_experts], 1)
    result: Floats = share.ravel()[at].reshape(table_LRS.shape)
    return result


def held_loads(table_LRS: Ints, loads_LE: Floats) -> Floats:
    """Return the load of the whole expert in every expert slot [L, R, S]. Values of empty slots are
    arbitrary and must not be used.
    """
    flat = np.where(table_LRS == EMPTY, 0, table_LRS).reshape(len(table_LRS), -1)
    return np.asarray(np.take_along_axis(loads_LE, flat, axis=1).reshape(table_LRS.shape))


def heaviest_rank(table_LRS: Ints, loads_LE: Floats) -> Floats:
    """Return the load of the heaviest rank [L] when the replicas of an expert share evenly."""
    return np.asarray(shares_of(table_LRS, loads_LE).sum(axis=2).max(axis=1))


def held_by(table_LRS: Ints, num_experts: int) -> Bools:
    """Return [L, R, E], True where a rank holds an expert."""
    held = np.zeros((*table_LRS.shape[:2], num_experts + 1), bool)
    layers, ranks = (
        np.arange(len(table_LRS))[:, None, None],
        np.arange(table_LRS.shape[1])[None, :, None],
    )
    held[layers, ranks, table_LRS] = True  # EMPTY is -1, the last column.
    return np.asarray(held[:, :, :-1])


def num_moved(old_LRS: Ints, new_LRS: Ints) -> Ints:
    """Return the number of replicas [L] that their rank did not hold before."""
    is_new = (new_LRS[:, :, :, None] != old_LRS[:, :, None, :]).all(axis=3) & (new_LRS != EMPTY)
    return np.asarray(is_new.sum(axis=(1, 2)))

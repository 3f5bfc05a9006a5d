"""Place experts for a window of steps, by the heaviest rank of each step instead of summed loads.

A step lasts as long as its heaviest rank, which differs from step to step. Experts that are busy in
the same steps should not share a rank, and summed loads do not show that. Ranks trade replicas
while this lowers the mean of the steps' maxima. Independent of time. All layers at once.

Shapes: T steps, L layers, E logical experts, R living ranks, S maximum expert slots of a
rank, Q = R * S expert slots, H light ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hadal.core.arrays import Bools, Floats, Ints
from hadal.core.placement import EMPTY
from hadal.policy.experts.increment import FREE
from hadal.policy.experts.paths import Path
from hadal.policy.experts.tables import heaviest_rank, shares_of

MAX_STEPS = 16
"""Steps of a window that are evaluated; a longer window is sampled evenly."""
NUM_LIGHT = 8
"""Number of ranks that the chosen rank may trade with: those with the least summed load."""


def sample(window_TLE: Floats) -> Floats:
    """Return at most MAX_STEPS of the window's steps."""
    steps = np.linspace(0, len(window_TLE) - 1, min(len(window_TLE), MAX_STEPS)).round().astype(int)
    return np.asarray(window_TLE[steps])


def mean_of_maxima(tables_LRS: Ints, window_TLE: Floats) -> Floats:
    """Return the load of the heaviest rank of a step, averaged over the steps [L]."""
    return np.asarray(np.mean([heaviest_rank(tables_LRS, step) for step in window_TLE], axis=0))


def judged_by(path: Path, window_TLE: Floats, num_expert_slots: int) -> Path:
    """Return the path with `tops_NL` from the window: the mean of its steps' maxima."""
    num_tables, num_layers, _ = path.tables_NLQ.shape
    tables = path.tables_NLQ.astype(np.int64).reshape(num_tables * num_layers, -1, num_expert_slots)
    tops = mean_of_maxima(tables, np.tile(window_TLE, (1, num_tables, 1)))
    return replace(path, tops_NL=tops.reshape(num_tables, num_layers).astype(np.float32))


def steadied(
    table_LRS: Ints,
    window_TLE: Floats,
    *,
    home_LRE: Bools | None = None,
    max_moves: int = 0,
    barred_LRE: Bools | None = None,
    num_rounds: int = 16,
) -> Ints:
    """Return a table [L, R, S] with no greater mean of maxima in any layer, found by trades.

    With homes, at most `max_moves` more replicas are away from home. Barred experts do not move to
    a rank. A round tries one trade in every layer, for the rank that most exceeds the others. If it
    finds none, the next round tries the next such rank; after three, the layer is done.
    """
    table = table_LRS.copy()
    num_layers, num_ranks, num_expert_slots = table.shape
    if num_ranks < 2:
        return table
    tried = np.zeros((num_layers, num_ranks), bool)
    active, left = np.arange(num_layers), max_moves
    for _ in range(num_rounds):
        window = window_TLE[:, active]
        shares = np.stack([shares_of(table[active], step) for step in window])
        loads = shares.sum(axis=3)
        top = _standing_out(loads, tried[active])
        slots, gains = _best_trade(table[active], shares, loads, top, barred_LRE, active)
        rows = np.arange(len(active))
        mine, other = slots // num_expert_slots, slots % num_expert_slots
        costs = np.zeros(len(active), np.int64)
        if home_LRE is not None:
            ours, theirs = (table[active, mine[:, i], other[:, i]] for i in (0, 1))
            for column, (old, new) in enumerate(((ours, theirs), (theirs, ours))):
                home = home_LRE[active, mine[:, column]]
                costs += (~home[rows, new]).astype(np.int64) - ~home[rows, old]
        lucky = np.flatnonzero(gains > 1e-5 * loads.max(axis=2).mean(axis=0))
        lucky = lucky[np.argsort(-gains[lucky] / np.maximum(costs[lucky], FREE), kind="stable")]
        if home_LRE is not None:
            lucky = lucky[np.cumsum(np.maximum(costs[lucky], 0)) <= left]
            left -= int(costs[lucky].sum())
        at = active[lucky]
        first, second = (mine[lucky, 0], other[lucky, 0]), (mine[lucky, 1], other[lucky, 1])
        table[at, first[0], first[1]], table[at, second[0], second[1]] = (
            table[at, second[0], second[1]],
            table[at, first[0], first[1]],
        )
        tried[active, top] = True
        tried[at] = False
        active = active[tried[active].sum(axis=1) < min(3, num_ranks)]
        if not len(active):
            break
    return table


def _standing_out(loads_TLR: Floats, tried_LR: Bools) -> Ints:
    """Return the untried rank [L] by which the steps' maxima most exceed the second heaviest rank."""
    two = np.partition(loads_TLR, -2, axis=2)[:, :, -2:]
    above = np.maximum(loads_TLR - two[:, :, :1], 0.0).sum(axis=0)
    return np.asarray(np.where(tried_LR, -1.0, above + 1e-6 * loads_TLR.sum(axis=0)).argmax(axis=1))


def _best_trade(
    table_LRS: Ints,
    shares_TLRS: Floats,
    loads_TLR: Floats,
    top_L: Ints,
    barred_LRE: Bools | None,
    layers_L: Ints,
) -> tuple[Ints, Floats]:
    """Return the best trade of one rank in each layer: (the two expert slots [L, 2], decrease of
    the mean of maxima [L]).
    """
    num_layers, num_ranks, num_expert_slots = table_LRS.shape
    rows = np.arange(num_layers)
    sums = loads_TLR.sum(axis=0)
    sums[rows, top_L] = np.inf
    light = np.argsort(sums, axis=1, kind="stable")[:, : min(NUM_LIGHT, num_ranks - 1)]
    others = loads_TLR.copy()
    others[:, rows, top_L] = -np.inf
    order = np.argsort(others, axis=2)[:, :, -2:]
    highest = np.take_along_axis(others, order, axis=2)
    rest = np.where(light == order[:, :, 1:], highest[:, :, :1], highest[:, :, 1:])  # [T, L, H]
    mine = shares_TLRS[:, rows, top_L]
    theirs = shares_TLRS[:, rows[:, None], light]
    delta = mine[:, :, :, None, None] - theirs[:, :, None]
    after = np.maximum(
        loads_TLR[:, rows, top_L][:, :, None, None, None] - delta, rest[:, :, None, :, None]
    )
    np.maximum(after, loads_TLR[:, rows[:, None], light][:, :, None, :, None] + delta, out=after)
    mean = after.mean(axis=0)  # [L, S, H, S]
    ours, held = table_LRS[rows, top_L], table_LRS[rows[:, None], light]
    mean[(held[:, None] == ours[:, :, None, None]).any(axis=3)] = np.inf
    double = (held[:, :, :, None] == ours[:, None, None, :]).any(axis=3) | (held == EMPTY)
    mean[np.broadcast_to(double[:, None], mean.shape)] = np.inf
    mean[ours == EMPTY] = np.inf
    if barred_LRE is not None:
        barred = barred_LRE[layers_L]
        mean[
            np.broadcast_to(barred[rows, top_L][rows[:, None, None], held][:, None], mean.shape)
        ] = np.inf
        mean[barred[rows[:, None, None], light[:, None, :], ours[:, :, None]]] = np.inf
    flat = mean.reshape(num_layers, -1)
    best = flat.argmin(axis=1)
    slot, at = np.divmod(best, mean.shape[2] * num_expert_slots)
    index, other = np.divmod(at, num_expert_slots)
    slots = np.stack(
        (top_L * num_expert_slots + slot, light[rows, index] * num_expert_slots + other), axis=1
    )
    return slots, np.asarray(loads_TLR.max(axis=2).mean(axis=0) - flat[rows, best])

"""Improve expert placements by exchanges: pairs of ranks trade replicas until the heaviest rank is
near the mean.

Independent of nodes and time. Replica counts do not change here. All layers at once.

Shapes: L layers, E logical experts, R living ranks, S maximum expert slots of a rank, H pairs
of ranks.
"""

from __future__ import annotations

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.core.placement import EMPTY
from hadal.policy.experts.tables import Singles, shares_of

NEVER = np.float32(1e9)


def exchange(
    table_LRS: Ints,
    loads_LE: Floats,
    ceiling_L: Floats,
    *,
    num_rounds: int,
    only_above: bool = False,
    toll: float = 0.0,
) -> Ints:
    """Return a table [L, R, S] with lighter heaviest ranks, never heavier; a layer stops at
    its ceiling.

    In a round, ranks are paired, heavy with light, and each pair trades the two replicas that best
    halve its difference. The pairing changes from round to round, so a pair that found nothing is
    not tried again at once. With `only_above`, only ranks above the ceiling trade: fewest changes.
    `toll`: weight of the load that a trade moves to the heavier rank, against how far the trade is
    from halving the difference; it avoids trades of large loads in both directions.
    """
    table = table_LRS.copy()
    half = table.shape[1] // 2
    if half < 1:
        return table
    shares = shares_of(table, loads_LE).astype(np.float32)
    shares[table == EMPTY] = np.nan
    active = np.arange(len(table))
    work_table, work_shares = table, shares
    loads = np.nansum(work_shares, axis=2)
    ceiling = ceiling_L.astype(np.float32)
    for index in range(num_rounds):
        if only_above or index % 4 == 0:
            left = np.flatnonzero(loads.max(axis=1) > ceiling)
            if not len(left):
                break
            if len(left) < len(active):
                table[active], shares[active] = work_table, work_shares
                active = active[left]
                work_table, work_shares, loads, ceiling = (
                    table[active],
                    shares[active],
                    loads[left],
                    ceiling[left],
                )
        order = np.argsort(loads, axis=1, kind="stable")
        low = np.roll(order[:, :half], index * (index + 1) // 2 % half, axis=1)
        high = order[:, ::-1][:, :half]
        _trade(
            work_table,
            work_shares,
            loads,
            high,
            low,
            ceiling if only_above else None,
            np.float32(toll),
        )
    table[active] = work_table
    return table


def _trade(
    table_LRS: Ints,
    shares_LRS: Singles,
    loads_LR: Singles,
    high_LH: Ints,
    low_LH: Ints,
    ceiling_L: Singles | None,
    toll: np.float32,
) -> None:
    """Make at most one trade per pair of ranks, in place: if the heavier rank becomes lighter and
    no rank then holds an expert twice.
    """
    num_layers, num_ranks, num_expert_slots = table_LRS.shape
    num_pairs = high_LH.shape[1]
    base = np.arange(num_layers)[:, None] * num_ranks
    high, low = (high_LH + base).ravel(), (low_LH + base).ravel()
    flat_loads = loads_LR.reshape(-1)
    flat_shares, flat_table = (
        shares_LRS.reshape(-1, num_expert_slots),
        table_LRS.reshape(-1, num_expert_slots),
    )
    if ceiling_L is not None:
        above = flat_loads[high] > np.repeat(ceiling_L, num_pairs)
        high, low = high[above], low[above]
    half_gap = (flat_loads[high] - flat_loads[low]) * np.float32(0.5)
    away = flat_shares[high][:, :, None] - (flat_shares[low] + half_gap[:, None])[:, None, :]
    np.abs(away, out=away)
    if toll:
        away += toll * flat_shares[low][:, None, :]
    away = np.fmin(away, NEVER).reshape(len(high), -1)
    best = away.argmin(axis=1)
    lucky = np.flatnonzero(
        away[np.arange(len(best)), best] < half_gap * np.float32(0.999) - np.float32(1e-7)
    )
    give, take = np.divmod(best[lucky], num_expert_slots)
    high, low = high[lucky], low[lucky]
    gives, takes = flat_table[high, give], flat_table[low, take]
    double = (flat_table[low] == gives[:, None]).any(axis=1) | (
        flat_table[high] == takes[:, None]
    ).any(axis=1)
    keep = ~double
    high, low, give, take, gives, takes = (
        high[keep],
        low[keep],
        give[keep],
        take[keep],
        gives[keep],
        takes[keep],
    )
    delta = flat_shares[high, give] - flat_shares[low, take]
    flat_loads[high] -= delta
    flat_loads[low] += delta
    flat_table[high, give], flat_table[low, take] = takes, gives
    flat_shares[high, give], flat_shares[low, take] = (
        flat_shares[low, take],
        flat_shares[high, give].copy(),
    )

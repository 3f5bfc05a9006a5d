"""Choose the rows of a decode unit that the next step computes; the others rest for that step.

A step takes a while by itself, and more for each row of its busiest rank. On a CPU a row costs a third
of an empty step, so a tenant's only row would crawl beside 31 rows of another. No slot is reserved
against that: the rows to compute are chosen anew for each step, and the other rows keep slot and KV.

    rows of a rank      a1 | b1 b2 b3 b4 b5 b6        a: the tenant with the fewest rows, over its weight
    step 1              a1   b1 b2
    step 2              a1         b3 b4              computed least recently: computed next
    step 3              a1               b5 b6

The tenant with the fewest rows has all of them in each step. Each other tenant has as many. Beyond
that, tenants share what `promise` leaves: the step takes at most `promise` times as long as one
with the first tenant's rows alone. Equal shares come before the promise, so each of k tenants gets
at least 1/k of the rows. Where rows cost next to nothing, as on a GPU, all are computed.

Batches come last: beside other rows, a step holds only as many of their rows as make it at most
BATCH_PROMISE times as long as without them.

No row starves. A row rests for fewer consecutive steps than its tenant has rows on its rank. A row
of a batch rests for at most BATCH_STEPS times as many steps as its rank has rows of batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hadal.core.arrays import Bools, Floats, Ints

BATCH_PROMISE = 1.1
"""Largest slowdown of a step by rows of batches, compared with the same step without them."""
BATCH_STEPS = 32
"""Every step with a multiple of this number computes a batch row on each rank that has one, even if
that breaks BATCH_PROMISE: 3 % of the steps, which p95 of the time between tokens does not show.
"""


@dataclass(frozen=True, slots=True)
class RowsView:
    """Rows that the next step may compute; all arrays are [rows]."""

    ranks: Ints
    tenants: Ints
    """Tenant number of each row."""
    weights: Floats
    """Weight of each row's tenant, the same in all its rows."""
    is_batch: Bools
    turns: Ints
    """Place of each row in the queue: the smallest is computed next (`requeued`)."""


def requeued(turns: Ints, is_computed: Bools) -> Ints:
    """Return the turns after a step: its computed rows queue behind all others, in their order."""
    rows = np.flatnonzero(is_computed)
    after: Ints = turns.copy()
    after[rows[np.argsort(turns[rows], kind="stable")]] = turns.max() + 1 + np.arange(rows.size)
    return after


def num_rows_within(line: tuple[float, float], promise: float, num_alone: int) -> int:
    """Return how many rows a step may hold to take at most `promise` times as long as one with
    `num_alone` rows. `line`: seconds of a step without rows, and of each row (above 0).
    """
    step_s, row_s = line
    longest_s = promise * (step_s + num_alone * row_s)
    return int((longest_s - step_s) / row_s + 1e-9)


def resting_rows(
    rows: RowsView, line: tuple[float, float], promise: float, step_id: int
) -> Bools | None:
    """Return the rows that rest in step `step_id`, [rows]; None: no row rests.

    `line`: as `num_rows_within` has it, (0, 0) while it is not measured.
    """
    if not rows.ranks.size or line[1] <= 0.0:
        return None
    num_most = int(np.bincount(rows.ranks).max())
    if num_most <= num_rows_within(line, min(promise, BATCH_PROMISE), 1):
        return None  # All rows fit, whichever tenant has the fewest.
    is_direct = ~rows.is_batch
    if not is_direct.any() or (rows.tenants == rows.tenants[0]).all():
        return None
    shares, counts = _shares(rows)
    is_computed = is_direct & _computed(rows, shares, counts, is_direct, line, promise)
    if rows.is_batch.any():
        num_direct_R = np.bincount(rows.ranks[is_computed], minlength=int(rows.ranks.max()) + 1)
        num_left_R = num_rows_within(line, BATCH_PROMISE, int(num_direct_R.max())) - num_direct_R
        num_left_R = np.maximum(num_left_R, int(step_id % BATCH_STEPS == 0))
        is_computed |= _first(rows, shares, rows.is_batch, num_left_R)
    return None if is_computed.all() else ~is_computed


def _shares(rows: RowsView) -> tuple[Floats, Ints]:
    """Return for each row (its tenant's rows before it on its rank, over the tenant's weight; the
    most rows that its tenant has on one rank).
    """
    order = np.lexsort((rows.turns, rows.tenants, rows.ranks))
    ranks, tenants = rows.ranks[order], rows.tenants[order]
    is_first = np.ones(order.size, np.bool_)
    is_first[1:] = (ranks[1:] != ranks[:-1]) | (tenants[1:] != tenants[:-1])
    firsts = np.flatnonzero(is_first)
    places = np.arange(order.size) - firsts[np.cumsum(is_first) - 1]
    shares: Floats = np.empty(order.size)
    shares[order] = places / rows.weights[order]
    num_most: Ints = np.zeros(int(tenants.max()) + 1, np.int64)
    np.maximum.at(num_most, tenants, places + 1)
    return shares, num_most[rows.tenants]


def _computed(
    rows: RowsView,
    shares: Floats,
    counts: Ints,
    is_direct: Bools,
    line: tuple[float, float],
    promise: float,
) -> Bools:
    """Return the rows that a step without batches computes."""
    least = int(np.where(is_direct, counts / rows.weights, np.inf).argmin())
    num_within = num_rows_within(line, promise, int(counts[least]))
    num_R = np.full(int(rows.ranks.max()) + 1, num_within)
    is_of_share: Bools = shares < counts[least] / rows.weights[least]
    return is_of_share | _first(rows, shares, is_direct, num_R)


def _first(rows: RowsView, shares: Floats, is_in: Bools, num_R: Ints) -> Bools:
    """Return the first `num_R` of these rows on each rank: least share first, then least turn."""
    chosen = np.flatnonzero(is_in)
    order = chosen[np.lexsort((rows.turns[chosen], shares[chosen], rows.ranks[chosen]))]
    ranks = rows.ranks[order]
    num_before_R = np.searchsorted(ranks, np.arange(num_R.size))
    found: Bools = np.zeros(is_in.size, np.bool_)
    found[order] = np.arange(order.size) - num_before_R[ranks] < num_R[ranks]
    return found

"""Place a step's arrivals on the ranks of a decode unit: equal KV and equal request counts at once.

A step takes as long as its slowest rank, and a rank's time grows with the KV that it reads and with
the requests that it computes. Either alone leaves the other uneven, so both are measured against
the unit's mean and the larger counts:

    kv share       (blocks used + the request's) / rank's blocks  over the same of the whole unit
    request share  (requests + 1) / rank's slots                  over the same of the whole unit
    choice         the rank where the larger of the two is smallest; the smaller one decides between equals

While a rank sticks out in KV, the others' KV costs less than the step takes anyway, so requests
count a little more (`SLACK`). Ranks then drift less into few large requests here and many small
ones there; it was found by measuring, and helps most where few arrive a step
(bench/balance_decode).

Arrivals of one step are placed largest first, as small ones fill what large ones left uneven. Who
gets in is decided not by size but by the order of arrival: when somebody does not fit, those who
came later wait, so nobody is overtaken.

Knows nothing of tensors, networks or time, and no output lengths: only what a request holds now and
at its longest. The caller owns the state and applies the choice. Shapes: R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hadal.core.arrays import Bools, Floats
from hadal.policy.admission import fits_decode
from hadal.policy.views import DecodeRanksView

TIE_WEIGHT = 1e-6
"""Share of the sum of both shares that is added to the larger one: it decides only between equals.
"""
SLACK = 0.25
"""Share of the fullest rank's lead in KV over the mean that is added to request shares. .25 was
chosen out of 0, .25, .35, .5 and .7: it lifts long outputs and long prompts (KV balance +.01) and
leaves short ones (azure-conv) at .98.
"""
SLACK_MAX = 0.03
"""A unit of few ranks or few requests is always uneven; there both shares should count about
alike.
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that waits for a rank."""

    num_blocks: int
    """KV blocks that it takes now, the one that its first step writes included."""
    num_blocks_worst: int
    """KV blocks that it holds if it runs to its last allowed token."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_blocks <= self.num_blocks_worst:
            raise ValueError(
                f"{self.num_blocks} blocks now, {self.num_blocks_worst} at its longest: not in"
                " order."
            )


class Shares:
    """Both shares of every rank over the unit's, kept up while requests come and go. One decision
    long.
    """

    def __init__(
        self, ranks: DecodeRanksView, num_blocks_coming: int, num_coming: int, *, preempts: bool
    ) -> None:
        """`..._coming` belong to the means: what the unit will hold when all are placed."""
        self.ranks = ranks
        self.preempts = preempts
        self.used_R = ranks.num_blocks_used.copy()
        self.worst_R = ranks.num_blocks_worst.copy()
        self.requests_R = ranks.num_requests.copy()
        kv_share = (int(self.used_R.sum()) + num_blocks_coming) / max(
            int(ranks.num_blocks.sum()), 1
        )
        request_share = (int(self.requests_R.sum()) + num_coming) / max(
            int(ranks.num_requests_max.sum()), 1
        )
        self.per_block_R: Floats = 1.0 / (np.maximum(ranks.num_blocks, 1) * (kv_share or 1.0))
        """What one block adds to a rank's KV share."""
        over = float((self.used_R * self.per_block_R).max(initial=1.0)) - 1.0
        self.slack = min(SLACK * over, SLACK_MAX)
        self.per_request_R: Floats = 1.0 / (
            np.maximum(ranks.num_requests_max, 1) * (request_share or 1.0)
        )

    @property
    def kv_R(self) -> Floats:
        return self.used_R * self.per_block_R

    @property
    def request_R(self) -> Floats:
        return self.requests_R * self.per_request_R

    def fits(self, arrival: Arrival) -> Bools:
        """[R] where it may go: a free slot, room in the worst case, or else somebody who is ready
        to let others go.

        Even then its own worst case has to fit into an empty rank, or preempting all others would
        not help it.
        """
        ranks = self.ranks
        fits_R: Bools = self.requests_R < ranks.num_requests_max
        if self.preempts:
            fits_R &= fits_decode(
                ranks.num_blocks - self.used_R, arrival.num_blocks, self.requests_R
            )
            fits_R &= arrival.num_blocks_worst <= ranks.num_blocks
        else:
            fits_R &= self.worst_R + arrival.num_blocks_worst <= ranks.num_blocks
        return fits_R

    def choose(self, arrival: Arrival) -> int | None:
        """The row of the best rank; None if it fits nowhere. The lowest row of equals."""
        fits_R = self.fits(arrival)
        kv_R = (self.used_R + arrival.num_blocks) * self.per_block_R
        request_R = (self.requests_R + 1) * self.per_request_R
        score_R = np.where(
            fits_R,
            np.maximum(kv_R, request_R + self.slack) + TIE_WEIGHT * (kv_R + request_R),
            np.inf,
        )
        row = int(score_R.argmin())
        return row if fits_R[row] else None

    def add(self, row: int, arrival: Arrival, count: int = 1) -> None:
        """Place it there; `count` -1 takes it away."""
        self.used_R[row] += count * arrival.num_blocks
        self.worst_R[row] += count * arrival.num_blocks_worst
        self.requests_R[row] += count


def place(ranks: DecodeRanksView, arrivals: Sequence[Arrival], *, preempts: bool) -> list[int]:
    """Return the ranks of the first arrivals, in their order; those behind the end of the list
    wait.

    `preempts`: the caller has a plan for a rank that runs short (policy/preemption), so what
    fits now with head-room is let in. Without it, only what fits if everybody on the rank runs to
    its longest.
    """
    num = _num_at_most(ranks, arrivals, preempts)
    while num > 0:
        shares, rows, failed = _largest_first(ranks, arrivals[:num], preempts)
        if failed is None:
            break
        num = failed
    else:
        shares, rows = (
            Shares(
                ranks, sum(arrival.num_blocks for arrival in arrivals[:1]), 1, preempts=preempts
            ),
            [],
        )
    # Without those who came behind the first that did not fit, it may fit after all.
    for arrival in arrivals[num:]:
        row = shares.choose(arrival) if ranks.ranks.size else None
        if row is None:
            break
        shares.add(row, arrival)
        rows.append(row)
    return ranks.ranks[rows].tolist() if rows else []


def _num_at_most(ranks: DecodeRanksView, arrivals: Sequence[Arrival], preempts: bool) -> int:
    """Return how many of the first arrivals might fit, were the unit one rank. A long queue is not
    worth a longer look.
    """
    num_slots = int(np.maximum(ranks.num_requests_max - ranks.num_requests, 0).sum())
    taken_R = ranks.num_blocks_used if preempts else ranks.num_blocks_worst
    num_blocks = int(np.maximum(ranks.num_blocks - taken_R, 0).sum())
    for index, arrival in enumerate(arrivals[:num_slots]):
        num_blocks -= arrival.num_blocks if preempts else arrival.num_blocks_worst
        if num_blocks < 0:
            return index
    return min(len(arrivals), num_slots)


def _largest_first(
    ranks: DecodeRanksView, arrivals: Sequence[Arrival], preempts: bool
) -> tuple[Shares, list[int], int | None]:
    """Place all: (the shares after it, rows by arrival, the earliest arrival that did not fit)."""
    shares = Shares(
        ranks, sum(arrival.num_blocks for arrival in arrivals), len(arrivals), preempts=preempts
    )
    rows = [-1] * len(arrivals)
    failed = None
    for index in sorted(range(len(arrivals)), key=lambda index: -arrivals[index].num_blocks):
        row = shares.choose(arrivals[index])
        if row is None:
            failed = index if failed is None else min(index, failed)
        else:
            shares.add(row, arrivals[index])
            rows[index] = row
    return shares, rows, failed

"""Place a step's arrivals on the ranks of a decode unit: equal KV and equal request counts at once.

A step takes as long as its slowest rank, and a rank's time grows with the KV that it reads and with
the requests that it computes. Balancing one alone leaves the other uneven, so both are measured
against the unit's mean and the larger one counts:

    kv share       (blocks used + the request's) / rank's blocks  over the same of the whole unit
    request share  (requests + 1) / rank's slots                  over the same of the whole unit
    choice         the rank where the larger of the two is smallest; the smaller one decides between equals

While one rank leads in KV, extra KV on the others does not lengthen the step, so requests count
slightly more (`SLACK`). Ranks then drift less into few large requests here and many small ones
there. This was found by measurement, and helps most where few requests arrive per step
(bench/balance_decode).

Arrivals of one step are placed largest first, because small ones fill the gaps that large ones
leave. Admission is in the caller's order, not by size: if a request does not fit, those after it
wait, so none is overtaken.

Independent of tensors, networks, time and output lengths: a request counts by its blocks now and at
its longest. The caller owns the state and applies the choice. Shapes: R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hadal.core.arrays import Bools, Floats
from hadal.policy.admission import fits_decode
from hadal.policy.views import DecodeRanksView

TIE_WEIGHT = 1e-6
"""Share of both shares' sum that is added to the larger one: it only breaks ties."""
SLACK = 0.25
"""Share of the fullest rank's lead in KV over the mean that is added to request shares. 0.25 was
chosen from 0, 0.25, 0.35, 0.5 and 0.7: it helps long outputs and long prompts (KV balance +0.01)
and leaves short ones (azure-conv) at 0.98.
"""
SLACK_MAX = 0.03
"""Upper bound of the slack: a unit of few ranks or few requests is always uneven, and both shares
should count about equally there.
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request that waits for a rank."""

    num_blocks: int
    """KV blocks that it takes now, including the one that its first step writes."""
    num_blocks_worst: int
    """KV blocks that it holds if it runs to its last allowed token."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_blocks <= self.num_blocks_worst:
            raise ValueError(
                f"num_blocks is {self.num_blocks}; it must be 0 to num_blocks_worst,"
                f" {self.num_blocks_worst}."
            )


class Shares:
    """KV share and request share of every rank over the unit's mean, updated by `add`. Valid for
    one decision.
    """

    def __init__(
        self, ranks: DecodeRanksView, num_blocks_coming: int, num_coming: int, *, preempts: bool
    ) -> None:
        """Compute shares over the unit's means after the coming requests and blocks are placed."""
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
        """KV share that one block adds to a rank."""
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
        """Return [R], True where the arrival fits: a free slot and blocks for its worst case; with
        `preempts`, only blocks for now and head-room (`fits_decode`).

        With `preempts`, its own worst case must still fit into an empty rank: otherwise preempting
        all other requests would not help.
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
        """Return the row of the best rank, the lowest of equals; None if the arrival fits nowhere."""
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
        """Add an arrival to a rank; `count` -1 removes it."""
        self.used_R[row] += count * arrival.num_blocks
        self.worst_R[row] += count * arrival.num_blocks_worst
        self.requests_R[row] += count


def place(ranks: DecodeRanksView, arrivals: Sequence[Arrival], *, preempts: bool) -> list[int]:
    """Return the ranks of the first arrivals, in their order; arrivals beyond the list wait.

    `preempts`: the caller can preempt on a rank that runs short (policy/preemption), so a request
    needs blocks only for its present length, and head-room. Otherwise there must be blocks for
    every request of the rank at its longest.
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
    # The first arrival that did not fit may fit now that later ones are not placed before it.
    for arrival in arrivals[num:]:
        row = shares.choose(arrival) if ranks.ranks.size else None
        if row is None:
            break
        shares.add(row, arrival)
        rows.append(row)
    return ranks.ranks[rows].tolist() if rows else []


def _num_at_most(ranks: DecodeRanksView, arrivals: Sequence[Arrival], preempts: bool) -> int:
    """Return how many of the first arrivals would fit if the unit were one rank: this bounds the
    work for a long queue.
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
    """Place all arrivals. Return (shares afterwards, rows by arrival, earliest arrival that did not fit)."""
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

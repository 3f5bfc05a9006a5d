"""Baselines for the request balancers: least requests, and round-robin.

Selected with `request_balance` "off" or "turns" in a deployment, in what-ifs of a simulated day and
in benchmarks. Independent of time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hadal.policy.decode_balance import Arrival, Shares
from hadal.policy.views import DecodeRanksView, PrefillRankView, PromptView


def place_by_counts(
    ranks: DecodeRanksView, arrivals: Sequence[Arrival], *, preempts: bool
) -> list[int]:
    """Return the ranks of the first arrivals by request counts alone: each goes to the rank with
    the fewest, the lowest of equals. (`policy/decode_balance.place` weighs KV too.)
    """
    shares, rows = Shares(ranks, 0, 0, preempts=preempts), list[int]()
    for arrival in arrivals:
        fits_R = shares.fits(arrival)
        if not fits_R.any():
            break
        row = int(np.where(fits_R, shares.requests_R, np.iinfo(np.int64).max).argmin())
        shares.add(row, arrival)
        rows.append(row)
    return ranks.ranks[rows].tolist() if rows else []


def place_in_turn(
    ranks: DecodeRanksView, arrivals: Sequence[Arrival], *, turn: int, preempts: bool
) -> list[int]:
    """Return the ranks of the first arrivals, round-robin: each goes to the next rank that it
    fits on, searched from rank `turn` on, then from the rank after the last choice.
    """
    shares, rows = Shares(ranks, 0, 0, preempts=preempts), list[int]()
    for arrival in arrivals:
        fitting = np.flatnonzero(shares.fits(arrival))
        if not fitting.size:
            break
        row = int(fitting[np.argmin((fitting - turn) % ranks.ranks.size)])
        turn = row + 1
        shares.add(row, arrival)
        rows.append(row)
    return ranks.ranks[rows].tolist() if rows else []


def rank_in_turn(ranks: Sequence[PrefillRankView], prompt: PromptView, number: int) -> int | None:
    """Return rank `number` of `ranks`, round-robin, regardless of load; None if the prompt must wait
    for that rank.
    """
    rank = ranks[number % len(ranks)]
    if (
        not rank.num_tokens_free
        or rank.num_starts_free <= 0
        or prompt.num_blocks_needed > rank.num_blocks_free
    ):
        return None
    return rank.rank

"""Split each rank's part of a step into two micro-batches of equal estimated time.

Time is `token_s` per token and `pair_s` per position that it attends to, itself included. A prompt
may be cut: its earlier tokens are in the first micro-batch, which writes its KV before the second
reads it (overlap/plan.order). Independent of the schedule and of the source of both rates; with
both zero, tokens alone are balanced.

Shapes: R ranks, S slots of a rank, P pairs of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from hadal.core.arrays import Bools, Ints

_LAST = np.iinfo(np.int64).max


def num_pairs_of(start: int, num_tokens: int) -> int:
    """Return the (token, position) pairs of attention: the token at p attends to p + 1 positions."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def split_chunks(chunks: Sequence[tuple[int, int]], token_s: float, pair_s: float) -> list[int]:
    """Return how many tokens of each (start, num_tokens) go into the first micro-batch.

    All chunks before one are wholly in the first, all after it wholly in the second. So at most one
    prompt is cut, and only its KV is read twice. The halves differ by at most one token's time.
    """
    token_s, pair_s = _rates(token_s, pair_s)
    costs_s = [
        token_s * num_tokens + pair_s * num_pairs_of(start, num_tokens)
        for start, num_tokens in chunks
    ]
    left_s = sum(costs_s) / 2
    taken: list[int] = []
    for (start, num_tokens), cost_s in zip(chunks, costs_s, strict=True):
        first = (
            num_tokens if cost_s <= left_s else _prefix(start, num_tokens, token_s, pair_s, left_s)
        )
        taken.append(first)
        # After a cut, a rounding remainder must not go to the next chunk.
        left_s = max(0.0, left_s - cost_s) if first == num_tokens else 0.0
    return taken


def split_ranks(lengths_RS: Ints, is_row_RS: Bools, token_s: float, pair_s: float) -> Bools:
    """Return the decode rows of the second micro-batch, for all ranks at once: bool [R, S].

    `lengths_RS`: positions that a row attends to; `is_row_RS`: slots that have a row. Rows are
    sorted by length and neighbours go to different micro-batches: the most different pairs first,
    the longer row to the micro-batch with less time. So the counts differ by at most one, and the
    times by at most one pair's difference.
    """
    token_s, pair_s = _rates(token_s, pair_s)
    is_second_RS = np.zeros(is_row_RS.shape, np.bool_)
    num_pairs = -(-int(is_row_RS.sum(axis=1).max(initial=0)) // 2)
    if not num_pairs:
        return is_second_RS
    # Longest first, empty slots last; a stable sort, so the lowest slot of equals is first.
    order_RS = np.where(is_row_RS, -lengths_RS, _LAST).argsort(axis=1, kind="stable")[
        :, : 2 * num_pairs
    ]
    longer_RP, shorter_RP = order_RS[:, ::2], order_RS[:, 1::2]
    if (
        shorter_RP.shape[1] < num_pairs
    ):  # The partner of an odd row is -1: it stands for a slot without a row.
        shorter_RP = np.pad(shorter_RP, ((0, 0), (0, 1)), constant_values=-1)
    length_RP = np.take_along_axis(lengths_RS, longer_RP, axis=1)
    is_pair_RP = np.take_along_axis(is_row_RS, longer_RP, axis=1)
    has_other_RP = np.take_along_axis(is_row_RS, shorter_RP, axis=1) & (shorter_RP >= 0)
    other_RP = np.take_along_axis(lengths_RS, shorter_RP, axis=1)
    differs_s_RP = np.where(
        has_other_RP, pair_s * (length_RP - other_RP), token_s + pair_s * length_RP
    )
    differs_s_RP[~is_pair_RP] = -1.0  # Last in the order.
    turn_RP = np.lexsort((longer_RP, -differs_s_RP), axis=1)
    in_turn_s_PR = np.maximum(np.take_along_axis(differs_s_RP, turn_RP, axis=1), 0.0).T.copy()
    puts_second_PR = np.empty(in_turn_s_PR.shape, np.bool_)
    ahead_s_R = np.zeros(len(lengths_RS))  # Time of the first micro-batch minus that of the second.
    for puts_R, differs_s_R in zip(puts_second_PR, in_turn_s_PR, strict=True):
        np.greater(ahead_s_R, 0.0, out=puts_R)
        ahead_s_R += np.where(puts_R, -differs_s_R, differs_s_R)
    puts_second_RP = np.empty(turn_RP.shape, np.bool_)
    np.put_along_axis(puts_second_RP, turn_RP, puts_second_PR.T, axis=1)
    for is_in_RP, slot_RP, puts_RP in (
        (is_pair_RP, longer_RP, puts_second_RP),
        (has_other_RP, shorter_RP, ~puts_second_RP),
    ):
        rank_N, pair_N = np.nonzero(is_in_RP)
        is_second_RS[rank_N, slot_RP[rank_N, pair_N]] = puts_RP[rank_N, pair_N]
    return is_second_RS


def _rates(token_s: float, pair_s: float) -> tuple[float, float]:
    if token_s < 0 or pair_s < 0:
        raise ValueError(f"token_s {token_s} and pair_s {pair_s} must not be negative.")
    # Only their ratio matters; scaling prevents underflow of their squares.
    most_s = max(token_s, pair_s)
    return (token_s / most_s, pair_s / most_s) if most_s else (1.0, 0.0)


def _prefix(start: int, num_tokens: int, token_s: float, pair_s: float, budget_s: float) -> int:
    """Return the number k of first tokens with the time nearest to the budget.

    k token_s + pair_s (k start + k (k + 1) / 2) = budget  <=>  (pair_s / 2) k^2 + linear k - budget = 0
    """
    linear = token_s + pair_s * (start + 0.5)
    # 2c / (b + sqrt(b^2 + 4ac)): no cancellation for tiny pair_s, and exact for pair_s 0.
    exact = 2 * budget_s / (linear + sqrt(linear * linear + 2 * pair_s * budget_s))
    k = min(int(exact), num_tokens)
    candidates = range(max(0, k - 1), min(num_tokens, k + 1) + 1)
    return min(
        candidates, key=lambda n: abs(token_s * n + pair_s * num_pairs_of(start, n) - budget_s)
    )

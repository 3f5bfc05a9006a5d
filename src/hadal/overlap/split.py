"""Split one rank's part of a step into two micro-batches of equal estimated time.

Time is `token_s` for a token and `pair_s` for each position it attends to, itself included. A prompt may be cut: its
earlier tokens are in the first micro-batch, whose KV is written before the second reads it (overlap/plan.order).
Knows no schedule, and not where the two rates come from; with both zero, tokens alone are balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt


def num_pairs_of(start: int, num_tokens: int) -> int:
    """(token, position) pairs of causal attention: a token at position p attends to p + 1 positions."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def split_chunks(chunks: Sequence[tuple[int, int]], token_s: float, pair_s: float) -> list[int]:
    """Return how many tokens of each (start, num_tokens) go into the first micro-batch.

    All chunks before one are wholly in the first, all after it wholly in the second: at most one prompt is cut, so no
    more than one has its weights' rows and its KV walked twice. The halves differ by one token's time at most.
    """
    token_s, pair_s = _rates(token_s, pair_s)
    costs_s = [token_s * num_tokens + pair_s * num_pairs_of(start, num_tokens) for start, num_tokens in chunks]
    left_s = sum(costs_s) / 2
    taken: list[int] = []
    for (start, num_tokens), cost_s in zip(chunks, costs_s, strict=True):
        first = num_tokens if cost_s <= left_s else _prefix(start, num_tokens, token_s, pair_s, left_s)
        taken.append(first)
        # Once a chunk is cut, rounding may leave a little: it must not flow into the next one.
        left_s = max(0.0, left_s - cost_s) if first == num_tokens else 0.0
    return taken


def split_rows(lengths: Sequence[int], token_s: float, pair_s: float) -> list[bool]:
    """Return which decode rows are in the second micro-batch; `lengths` are the positions that each attends to.

    Neighbours in order of length are put apart, the pairs that differ most first, the longer one where less is: so the
    counts differ by one at most, and the times by no more than one pair does.
    """
    token_s, pair_s = _rates(token_s, pair_s)
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    pairs: list[tuple[float, int, int | None]] = []
    for at in range(0, len(rows) - 1, 2):
        longer, shorter = rows[at], rows[at + 1]
        pairs.append((pair_s * (lengths[longer] - lengths[shorter]), longer, shorter))
    if len(rows) % 2:
        pairs.append((token_s + pair_s * lengths[rows[-1]], rows[-1], None))
    is_second = [False] * len(lengths)
    ahead_s = 0.0  # First minus second.
    for differs_s, longest, other in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
        puts_second = ahead_s > 0
        is_second[longest] = puts_second
        if other is not None:
            is_second[other] = not puts_second
        ahead_s += -differs_s if puts_second else differs_s
    return is_second


def _rates(token_s: float, pair_s: float) -> tuple[float, float]:
    if token_s < 0 or pair_s < 0:
        raise ValueError(f"token_s {token_s} and pair_s {pair_s} must not be negative.")
    # Only their ratio matters; scaled, no square of them can vanish.
    most_s = max(token_s, pair_s)
    return (token_s / most_s, pair_s / most_s) if most_s else (1.0, 0.0)


def _prefix(start: int, num_tokens: int, token_s: float, pair_s: float, budget_s: float) -> int:
    """The number k of first tokens whose time is nearest to the budget.

    k token_s + pair_s (k start + k (k + 1) / 2) = budget  <=>  (pair_s / 2) k^2 + linear k - budget = 0
    """
    linear = token_s + pair_s * (start + 0.5)
    # 2c / (b + sqrt(b^2 + 4ac)): no cancellation where pair_s is tiny, and right where it is zero.
    exact = 2 * budget_s / (linear + sqrt(linear * linear + 2 * pair_s * budget_s))
    k = min(int(exact), num_tokens)
    candidates = range(max(0, k - 1), min(num_tokens, k + 1) + 1)
    return min(
        candidates, key=lambda n: abs(token_s * n + pair_s * num_pairs_of(start, n) - budget_s)
    )

"""Cost of a rank's step as a formula, and the number of tokens that fit into a time budget.

    seconds of positions start .. start+n-1 = n token_s + pair_s (n start + n (n + 1) / 2)

Independent of ranks, steps and the origin of the rates (live: perf/costs, by roles/unit/schedule).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


def chunk_s(token_s: float, pair_s: float, start: int, num_tokens: int) -> float:
    """Return the seconds of `num_tokens` positions from `start` on."""
    return num_tokens * (token_s + pair_s * (start + 0.5 * (num_tokens + 1)))


@dataclass(frozen=True, slots=True)
class StepRates:
    """Cost rates of a unit's step. Only ratios matter for a plan, so any time unit will do."""

    token_s: float
    """Time per token on the token's own rank."""
    pair_s: float
    """Time per (token, position it attends to) pair on the token's own rank."""
    dispatch_s: float = 0.0
    """Time per token of the busiest rank, for which all ranks wait; 0 if transfers are hidden."""
    step_s: float = 0.0
    """Fixed time of a step, independent of its tokens: launches, weights read, the first exchange,
    which is not hidden.
    """
    mean_s: float = 0.0
    """Time per token that all ranks share, because experts compute tokens of every rank. Only the
    unit's mean counts: fewer tokens on one rank make its experts no faster.
    """

    def __post_init__(self) -> None:
        if self.token_s <= 0 or min(self.pair_s, self.dispatch_s, self.step_s, self.mean_s) < 0:
            raise ValueError(f"{self}: token_s must be positive and the others not negative.")

    @property
    def all_token_s(self) -> float:
        """Cost of a token for the unit, in seconds of a rank, without the positions that it attends to."""
        return self.token_s + self.dispatch_s + self.mean_s

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Return the seconds of `num_tokens` positions from `start` on."""
        return chunk_s(self.token_s, self.pair_s, start, num_tokens)

    def whole_s(self, start: int, num_tokens: int) -> float:
        """Return `chunk_s` plus the cost of these tokens on other ranks, in seconds."""
        return self.chunk_s(start, num_tokens) + (self.all_token_s - self.token_s) * num_tokens

    def fit(self, start: int, num_tokens: int, budget_s: float) -> tuple[int, float]:
        """Return the most of `num_tokens` positions from `start` on that fit into `budget_s`, and
        their seconds.
        """
        if budget_s <= 0.0 or num_tokens <= 0:
            return 0, 0.0
        half_s, linear = 0.5 * self.pair_s, self.token_s + self.pair_s * (start + 0.5)
        seconds = num_tokens * (linear + half_s * num_tokens)
        if seconds <= budget_s:
            return num_tokens, seconds
        # The root of half_s n^2 + linear n - budget, in the form without cancellation that allows
        # half_s = 0.
        n = int(2.0 * budget_s / (linear + sqrt(linear * linear + 4.0 * half_s * budget_s)))
        if n < num_tokens and (n + 1) * (linear + half_s * (n + 1)) <= budget_s:
            n += 1
        while n > 0 and n * (linear + half_s * n) > budget_s:
            n -= 1
        return n, n * (linear + half_s * n)

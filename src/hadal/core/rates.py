"""What a step of a rank takes, as a line, and how many tokens fit into some of it.

    seconds of positions start .. start+n-1 = n token_s + pair_s (n start + n (n + 1) / 2)

Knows no ranks and no steps, and not where the rates come from (live: perf/costs, by
roles/unit/schedule).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


def chunk_s(token_s: float, pair_s: float, start: int, num_tokens: int) -> float:
    """Seconds of `num_tokens` positions from `start` on."""
    return num_tokens * (token_s + pair_s * (start + 0.5 * (num_tokens + 1)))


@dataclass(frozen=True, slots=True)
class StepRates:
    """What a unit's time goes into. Only ratios matter for a plan, so any unit will do."""

    token_s: float
    """Time that a token takes on its rank."""
    pair_s: float
    """Time that a (token, position it attends to) pair takes on its rank."""
    dispatch_s: float = 0.0
    """Time that a token takes on the rank that has most of them, for which all wait; 0 where
    transfers are hidden.
    """
    step_s: float = 0.0
    """Time that a step takes whatever it computes: launches, weights read, the first exchange that
    nothing hides.
    """
    mean_s: float = 0.0
    """Time that a token takes whichever rank has it, as a share of all ranks: experts compute what
    the others send, so it is the unit's mean that counts, and to give a rank fewer tokens makes its
    experts no faster.
    """

    def __post_init__(self) -> None:
        if self.token_s <= 0 or min(self.pair_s, self.dispatch_s, self.step_s, self.mean_s) < 0:
            raise ValueError(f"{self}: token_s must be positive and the others not negative.")

    @property
    def all_token_s(self) -> float:
        """All that a token costs the unit, by ranks, without the positions that it attends to."""
        return self.token_s + self.dispatch_s + self.mean_s

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Seconds of `num_tokens` positions from `start` on."""
        return chunk_s(self.token_s, self.pair_s, start, num_tokens)

    def whole_s(self, start: int, num_tokens: int) -> float:
        """The same with what others do for them."""
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
        # The root of half_s n^2 + linear n - budget, in the form that does not cancel and allows
        # half_s = 0.
        n = int(2.0 * budget_s / (linear + sqrt(linear * linear + 4.0 * half_s * budget_s)))
        if n < num_tokens and (n + 1) * (linear + half_s * (n + 1)) <= budget_s:
            n += 1
        while n > 0 and n * (linear + half_s * n) > budget_s:
            n -= 1
        return n, n * (linear + half_s * n)

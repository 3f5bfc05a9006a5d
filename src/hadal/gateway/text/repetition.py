"""Detect a generation that repeats itself endlessly: tokens in, period out.

Conservative: counting, tables, and a word requested a hundred times are not loops. A loop is a run
of at most 64 tokens repeated at least 16 times without a break, over at least 512 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_TOKENS = 512
MIN_TIMES = 16
WINDOW = MAX_PERIOD * MIN_TIMES
"""Number of last tokens that matter."""


def repeated_period(tokens: Sequence[int]) -> int:
    """Return the number of tokens repeated endlessly at the end of `tokens`; 0 if none are."""
    size = len(tokens)
    for period in range(1, MAX_PERIOD + 1):
        run = max(MIN_TOKENS, period * MIN_TIMES)
        if size < run:
            break
        if tokens[-1] != tokens[-1 - period]:
            continue
        if tokens[size - run + period :] == tokens[size - run : size - period]:
            return period
    return 0


_LOOK_TOKENS = 64
"""Number of tokens between two checks, independent of their grouping in deliveries."""


class Repetition:
    """Last tokens of one text, checked for repetition."""

    def __init__(self, min_tokens: int) -> None:
        """`min_tokens`: number of first tokens without checks."""
        self.period = 0
        """Number of tokens that the text repeats endlessly; 0: none."""
        self._min_tokens = min_tokens
        self._recent: list[int] = []

    def has_begun(self, token: int, num_tokens: int) -> bool:
        """Accept a text's `num_tokens`th token. Return True if a check now finds repetition."""
        self._recent.append(token)
        if num_tokens % _LOOK_TOKENS or num_tokens <= self._min_tokens:
            return False
        del self._recent[:-WINDOW]
        self.period = repeated_period(self._recent)
        return self.period > 0

"""Tell a generation that goes round in circles from one that only repeats something a while: tokens in,
period out.

Conservative: counting, tables, and a word that is asked for a hundred times go through. A text in which
the same 64 tokens or fewer came at least 16 times in a row, over at least 512 tokens, with nothing
between, is a loop. Knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_TOKENS = 512
MIN_TIMES = 16
WINDOW = MAX_PERIOD * MIN_TIMES
"""Number of last tokens that matter."""


def repeated_period(tokens: Sequence[int]) -> int:
    """How many tokens are repeated without end at the end of `tokens`; 0 if none are."""
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
"""Tokens of a text between two looks for a repetition, however they come."""


class Repetition:
    """The last tokens of one text, in which a repetition is looked for."""

    def __init__(self, min_tokens: int) -> None:
        """`min_tokens`: number of first tokens after which no look is taken."""
        self.period = 0
        """Tokens that the text repeats without end; 0: none."""
        self._min_tokens = min_tokens
        self._recent: list[int] = []

    def has_begun(self, token: int, num_tokens: int) -> bool:
        """Take a token in, the `num_tokens`th of its text, and return whether the text repeats itself."""
        self._recent.append(token)
        if num_tokens % _LOOK_TOKENS or num_tokens <= self._min_tokens:
            return False
        del self._recent[:-WINDOW]
        self.period = repeated_period(self._recent)
        return self.period > 0

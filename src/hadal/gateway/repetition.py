"""Tell a generation that goes round in circles from one that only repeats something a while: tokens
in, period out.

Conservative: counting, tables, and a word that is asked for a hundred times go through. A text in
which the same 64 tokens or fewer came at least 16 times in a row, over at least 512 tokens, with
nothing between, is a loop.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_TOKENS = 512
MIN_TIMES = 16
WINDOW = MAX_PERIOD * MIN_TIMES
"""So many last tokens are all that matters."""


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

"""Results of a step's drafts (speculative tokens), by their position after the last token.

    a slot's drafts    d1 d2 d3
    drawn              d1 d2 x         d1 and d2 are right, d3 is wrong

Drafts after a wrong one are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

Compared = tuple[tuple[int, int], ...]
"""Per position: (drafts compared with the drawn token, drafts equal to it)."""
_NONE = (0, 0)


def compared(num_checked_N: NDArray[np.int64], num_right_N: NDArray[np.int64]) -> Compared:
    """Return the counts over N slots, from the numbers of checked and of right drafts per slot."""
    return tuple(
        (
            int(np.count_nonzero((num_checked_N > place) & (num_right_N >= place))),
            int(np.count_nonzero(num_right_N > place)),
        )
        for place in range(int(num_checked_N.max(initial=0)))
    )


def summed(parts: Iterable[Compared]) -> Compared:
    """Return the sum over several passes or ranks, per position."""
    total: Compared = ()
    for part in parts:
        both = zip_longest(total, part, fillvalue=_NONE)
        total = tuple((tried + also, right + too) for (tried, right), (also, too) in both)
    return total

"""Every legal schedule, for tests that search all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hadal.overlap.plan import (
    ATTN_CORE,
    ATTN_IN,
    COMBINE_FINISH,
    COMBINE_START,
    DISPATCH_FINISH,
    DISPATCH_START,
    EXPERTS,
    GATE,
    SHARED,
    Schedule,
)


def variants() -> Iterator[Schedule]:
    """Yield every legal way to cut a layer in stages, to place the shared expert and to trail:
    15,348 schedules to search.

    The needs of a communication fix the order of all other ops. Starting it before its input exists
    is impossible; starting it later only wastes the link.
    """
    chain = (
        ATTN_IN,
        ATTN_CORE,
        GATE,
        DISPATCH_START,
        DISPATCH_FINISH,
        EXPERTS,
        COMBINE_START,
        COMBINE_FINISH,
    )
    for at in range(chain.index(GATE), chain.index(COMBINE_FINISH) + 1):
        ops = (*chain[:at], SHARED, *chain[at:])
        for cuts in range(1, 2 ** (len(ops) - 1)):
            edges = [0, *(gap for gap in range(1, len(ops)) if cuts >> (gap - 1) & 1), len(ops)]
            stages = tuple(ops[start:end] for start, end in pairwise(edges))
            for runs_on in (False, True):
                for offset in range(len(stages)):
                    yield Schedule(f"cut {at}.{cuts}", stages, offset, runs_on)

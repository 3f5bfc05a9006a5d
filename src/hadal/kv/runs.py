"""Runs of adjacent blocks, so that each run is moved in one operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise


def runs(first_row: Sequence[int], *rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (index of its first number, count) of each run: a stretch in which every row has
    consecutive numbers. Raises ValueError if the rows' lengths differ.
    """
    if any(len(row) != len(first_row) for row in rows):
        raise ValueError(
            f"rows need equal lengths; they have {[len(first_row), *map(len, rows)]} numbers."
        )
    cuts = {
        index
        for row in (first_row, *rows)
        for index, (before, after) in enumerate(pairwise(row), 1)
        if after != before + 1
    }
    start = 0
    for end in (*sorted(cuts), len(first_row)):
        if end > start:
            yield start, end - start
        start = end

"""Runs of adjacent blocks, so that each run is moved in one operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise


def runs(first_row: Sequence[int], *rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (index of the first, number) of each run: stretches in which every row continues with
    consecutive numbers. Rows have equal length.

    Raises ValueError if their lengths differ.
    """
    if any(len(row) != len(first_row) for row in rows):
        raise ValueError(
            f"rows of {[len(first_row), *map(len, rows)]} numbers have no runs in common."
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

"""Free disk slots as runs of adjacent slots, so that blocks written together are placed together.

A disk slot is a number; consecutive numbers are adjacent. Independent of the use of the disk slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise


class FreeRuns:
    """Set of free runs. Adjacent runs are always merged."""

    def __init__(self) -> None:
        self._first_to_count: dict[int, int] = {}
        self._end_to_first: dict[int, int] = {}
        """Number after the last disk slot of a run -> number of its first slot."""
        self._count_to_firsts: dict[int, dict[int, None]] = {}
        self._num = 0

    def __len__(self) -> int:
        """Return the number of free disk slots."""
        return self._num

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the runs: (first disk slot, number of slots)."""
        return iter(self._first_to_count.items())

    def add(self, first: int, count: int = 1) -> None:
        """Free `count` disk slots from `first` on, which must not be free already."""
        self._num += count
        before = self._end_to_first.get(first)
        if before is not None:
            count += self._drop(before)
            first = before
        if first + count in self._first_to_count:
            count += self._drop(first + count)
        self._put(first, count)

    def take(self, count: int) -> tuple[int, int] | None:
        """Take up to `count` adjacent disk slots: from the shortest run that has `count`, else all
        of the longest run.

        Returns (first disk slot, number of slots), or None if none is free.
        """
        if not self._num or count < 1:
            return None
        best = count
        if count not in self._count_to_firsts:
            best = min((have for have in self._count_to_firsts if have > count), default=0) or max(
                self._count_to_firsts
            )
        first = next(iter(self._count_to_firsts[best]))
        have = self._drop(first)
        taken = min(count, have)
        if have > taken:
            self._put(first + taken, have - taken)
        self._num -= taken
        return first, taken

    def remove(self, is_gone: Callable[[int], bool]) -> None:
        """Remove every run with a first disk slot for which `is_gone` is true."""
        for first in [first for first in self._first_to_count if is_gone(first)]:
            self._num -= self._drop(first)

    def check(self) -> list[str]:
        """Return problems; empty if no runs touch or overlap and counts are right."""
        problems = []
        runs = sorted(self._first_to_count.items())
        if any(first + count >= after for (first, count), (after, _) in pairwise(runs)):
            problems.append("free runs touch or overlap")
        if sum(count for _, count in runs) != self._num:
            problems.append("the number of free slots is wrong")
        if self._end_to_first != {first + count: first for first, count in runs}:
            problems.append("the ends of free runs are wrong")
        if sorted((f, c) for c, firsts in self._count_to_firsts.items() for f in firsts) != runs:
            problems.append("the lengths of free runs are wrong")
        return problems

    def _put(self, first: int, count: int) -> None:
        self._first_to_count[first] = count
        self._end_to_first[first + count] = first
        self._count_to_firsts.setdefault(count, {})[first] = None

    def _drop(self, first: int) -> int:
        count = self._first_to_count.pop(first)
        del self._end_to_first[first + count]
        firsts = self._count_to_firsts[count]
        del firsts[first]
        if not firsts:
            del self._count_to_firsts[count]
        return count

"""Counts of a step's drafts."""

from __future__ import annotations

import numpy as np

from hadal.core.drafts import compared, summed


def test_drafts_behind_a_wrong_one_are_not_compared() -> None:
    checked, right = np.array([3, 3, 2, 0]), np.array([3, 1, 0, 0])
    assert compared(checked, right) == ((3, 2), (2, 1), (1, 1))
    assert compared(np.zeros(2, np.int64), np.zeros(2, np.int64)) == ()


def test_passes_and_ranks_are_summed_by_place() -> None:
    assert summed([((3, 2),), (), ((1, 1), (1, 0))]) == ((4, 3), (1, 0))
    assert summed([]) == ()

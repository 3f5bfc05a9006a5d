"""A rank's own block table, in entries that a leader's plans do not reach."""

from __future__ import annotations

import numpy as np

from hadal.core.plans import Join, Sampling
from hadal.model.rank_table import RankTable


def test_written_blocks_are_those_of_the_positions_so_far() -> None:
    table = RankTable(4, 300)
    table.join(Join(2, (7, 5, 9), 127, 1, 1, Sampling()))
    table.join(Join(1, (3,), 10, 1, 1, Sampling()))
    found = (table.written_blocks(2), table.written_blocks(1), table.written_blocks(0))
    assert found == ([7, 5], [3], [])
    table.advance(np.array([1, 1]), np.array([1, 1]))
    assert table.written_blocks(2) == [7, 5]
    table.advance(np.array([1, 1]), np.array([1, 1]))
    assert table.written_blocks(2) == [7, 5, 9]

"""RankPools: who lives, what is theirs, and what was freed."""

from __future__ import annotations

import pytest

from hadal.core.seams import Freed, RankReset
from hadal.roles.rank_pools import RankPools


def test_a_rank_alone_lives_from_the_start_and_several_wait_to_be_named() -> None:
    assert (RankPools(5, 1, "pool").living, RankPools(5, 1, "pool").names) == ([0], ["pool"])
    pools = RankPools(5, 3)
    assert (pools.living, pools.num_usable, pools.num_blocks_request, pools.num_blocks_rank) == ([], 0, 0, 4)
    pools.reset(RankReset((), (0, 2), ("a", "", "c"), 2))
    assert (pools.living, pools.num_usable, pools.num_blocks_request) == ([0, 2], 8, 4)
    assert (pools.names, pools.generation) == (["a", "", "c"], 2)


def test_freed_blocks_are_told_once_by_rank() -> None:
    pools = RankPools(5, 2)
    pools.reset(RankReset((), (0, 1), ("a", "b"), 1))
    for rank in (0, 1):
        blocks = pools[rank].allocate(2, "x")
        assert blocks is not None
        pools.free(rank, blocks, "x")
    assert pools.take_freed() == [Freed((1, 2), 0), Freed((1, 2), 1)]
    assert pools.take_freed() == []


def test_a_lost_rank_comes_back_empty_and_a_living_one_in_fresh_was_lost() -> None:
    pools = RankPools(5, 2)
    pools.reset(RankReset((), (0, 1), ("a", "b"), 1))
    pools[1].allocate(2, "x")
    event = RankReset((), (1,), ("a", "b2"), 2)
    assert pools.lost(event) == [1]
    pools.reset(event)
    assert (pools.num_used, pools.names, pools.check()) == (0, ["a", "b2"], [])


def test_check_sees_blocks_on_a_dead_rank() -> None:
    pools = RankPools(5, 2)
    pools[0].allocate(1, "x")
    assert pools.check() == ["rank 0 is dead and holds 1 blocks"]
    with pytest.raises(ValueError, match="at least one"):
        RankPools(5, 0)

"""Test RankPools: live ranks, their blocks, and freed blocks."""

from __future__ import annotations

import random

import pytest

from hadal.core.cache import NAME_BYTES
from hadal.core.messages.pools import Freed
from hadal.core.seams import RankReset
from hadal.kv.names import extend
from hadal.roles.ranks.pools import RankPools
from tests.fresh import fresh


def test_a_rank_alone_lives_from_the_start_and_several_wait_to_be_named() -> None:
    assert (RankPools(5, 1, "pool").living, RankPools(5, 1, "pool").names) == ([0], ["pool"])
    pools = RankPools(5, 3)
    found = (pools.living, pools.num_usable, pools.num_blocks_request, pools.num_blocks_rank)
    assert found == ([], 0, 0, 4)
    pools.reset(RankReset((), (0, 2), ("a", "", "c"), 2))
    assert (pools.living, pools.num_usable, pools.num_blocks_request) == ([0, 2], 8, 4)
    assert (pools.names, pools.formation) == (["a", "", "c"], 2)


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


def named(pools: RankPools, rank: int, names: bytes) -> None:
    """Cache a block under each name."""
    blocks = pools[rank].allocate(len(names) // 16, "x")
    assert blocks is not None
    pools[rank].name(blocks, names, 0)
    pools.free(rank, blocks, "x")
    pools.take_freed()


def test_a_name_is_told_when_the_first_rank_has_it_and_when_the_last_has_not() -> None:
    pools = RankPools(5, 2)
    pools.reset(RankReset((), (0, 1), ("a", "b"), 1))
    one, two = bytes(16), bytes(range(16))
    named(pools, 0, one + two)
    assert pools.take_names() == (one + two, b"")
    named(pools, 1, one)
    assert (pools.take_names(), pools.num_named, pools.found_names) == ((b"", b""), 3, one + two)
    pools.reset(RankReset((0,), (), ("", "b"), 2))
    assert pools.take_names() == (b"", two)
    assert (pools.num_named, pools.num_evicted, pools.check()) == (1, 0, [])


def test_evicted_blocks_are_told_as_freed_and_counted() -> None:
    pools = RankPools(5)
    named(pools, 0, bytes(16))
    assert pools.take_names() == (bytes(16), b"")
    assert pools[0].allocate(4, "y") is not None
    (freed,) = pools.take_freed()
    assert (len(freed.block_ids), pools.num_evicted) == (1, 1)
    assert pools.take_names() == (b"", bytes(16))


@pytest.mark.parametrize("seed", [1, 2, fresh().randrange(1 << 32)])
def test_prefixes_are_what_a_look_at_every_rank_finds(seed: int) -> None:
    random_ = random.Random(seed)
    pools = RankPools(9, 4)
    pools.reset(RankReset((), (0, 1, 3), ("a", "b", "", "d"), 1))
    texts = [tuple(range(64 * 3)) + (branch,) * 64 * 5 for branch in range(3)]
    chains = [extend(b"", b"", text, b"salt") for text in texts]
    for _ in range(300):
        rank, num = random_.choice(pools.living), random_.randint(1, 8)
        blocks = pools[rank].allocate(num, "x")  # Evicts cached blocks.
        assert blocks is not None
        if random_.random() < 0.7:
            pools[rank].name(blocks, random_.choice(chains), random_.randint(0, 8 - num))
        pools.free(rank, blocks, "x")
        if random_.random() < 0.05:
            pools.forget_names(rank)
        pools.take_freed()
        assert pools.check() == []
        for chain in chains:
            seen = {rank: len(pools[rank].lookup(chain)) for rank in range(4)}
            assert pools.prefixes(chain) == {rank: num for rank, num in seen.items() if num}, seed
        assert pools.prefixes(bytes(NAME_BYTES)) == pools.prefixes(b"") == {}


def test_a_rank_hears_that_its_names_are_taken_back() -> None:
    """Names of owned blocks are withdrawn too, though these blocks are not freed."""
    pools = RankPools(9, 2, reports_names=True)
    pools.reset(RankReset((), (0, 1), ("a", "b"), 1))
    first, second = (extend(b"", b"", (number,) * 64, b"salt") for number in (1, 2))
    blocks = pools[1].allocate(2, "x")
    assert blocks is not None
    pools[1].name(blocks[:1], first, 0)
    assert pools.take_freed() == []
    assert [told.are_all for told in pools.take_named()] == [False]
    pools.forget_names(1)
    pools[1].name(blocks[1:], second, 0)
    assert pools.take_freed() == []
    (told,) = pools.take_named()
    assert (told.named.block_ids, told.rank, told.are_all) == ((blocks[1],), 1, True)
    assert pools.take_freed() == pools.take_named() == []
    pools.forget_names(1)
    pools.reset(RankReset((), (1,), ("a", "c"), 2))
    assert pools.take_named() == []


def test_owners_and_holders_are_compared_block_by_block() -> None:
    pools = RankPools(6)
    blocks = pools[0].allocate(2, "a")
    assert blocks is not None
    pools[0].acquire(blocks[:1], "b")
    assert pools.check_owners(0, [("a", blocks), ("b", blocks[:1])]) == []
    for holders in (
        [("a", blocks)],
        [("a", blocks), ("b", blocks)],
        [("a", blocks), ("a", blocks[:1])],
    ):
        assert pools.check_owners(0, holders)

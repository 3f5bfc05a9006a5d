"""BlockAllocator: all or nothing, owners respected, generations raised, against a plain set under random use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadal.core.errors import InvariantError
from hadal.kv.blocks import BlockAllocator, blocks_for


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n) for n in (0, 1, 63, 64, 65, 128)] == [0, 1, 1, 1, 2, 2]


def test_the_scratch_block_is_never_handed_out() -> None:
    blocks = BlockAllocator(5)
    assert blocks.num_usable == 4
    assert sorted(blocks.allocate(4, "a") or ()) == [1, 2, 3, 4]
    assert blocks.allocate(1, "b") is None


def test_a_pool_needs_more_than_the_scratch_block() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockAllocator(1)


def test_too_many_takes_none() -> None:
    blocks = BlockAllocator(4)
    assert blocks.allocate(4, "a") is None
    assert blocks.num_free == 3
    assert blocks.allocate(0, "a") == ()


def test_free_raises_generations_once_each() -> None:
    blocks = BlockAllocator(4)
    held = blocks.allocate(2, "a")
    assert held is not None
    before = blocks.generations(held)
    blocks.free(held, "a")
    assert blocks.generations(held) == tuple(g + 1 for g in before)
    assert blocks.check() == []


@pytest.mark.parametrize(("block", "owner"), [(1, "b"), (0, "a"), (9, "a"), (-1, "a"), (2, "a")])
def test_freeing_what_is_not_owned_is_a_bug(block: int, owner: str) -> None:
    blocks = BlockAllocator(4)
    assert blocks.allocate(1, "a") == (1,)
    with pytest.raises(InvariantError, match="does not own"):
        blocks.free((block,), owner)


def test_check_sees_a_lost_block() -> None:
    blocks = BlockAllocator(4)
    blocks._free.pop()
    assert blocks.check()


def test_check_sees_a_block_that_is_free_and_owned() -> None:
    blocks = BlockAllocator(4)
    held = blocks.allocate(1, "a")
    assert held is not None
    blocks._free.append(held[0])
    assert any("free and owned" in problem for problem in blocks.check())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=60))
def test_any_use_adds_up(uses: list[tuple[int, int]]) -> None:
    blocks = BlockAllocator(8)
    held: dict[int, tuple[int, ...]] = {}
    for owner, count in uses:
        if owner in held:
            blocks.free(held.pop(owner), owner)
        else:
            got = blocks.allocate(count, owner)
            in_use = {block for ids in held.values() for block in ids}
            assert (got is None) == (count > 7 - len(in_use))
            if got is not None:
                assert len(got) == count
                assert not in_use & set(got)
                held[owner] = got
        assert blocks.check() == []
        assert blocks.num_used == sum(map(len, held.values()))

"""Blocks on their way to disk: few at a time, in order, none twice."""

from __future__ import annotations

from hadal.core.cache import SKIPPED_BLOCKS, Place, split
from hadal.core.plans import BlocksStored
from hadal.core.seams import RankReset
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit import disk_stores
from hadal.roles.unit.disk_stores import StoreBook


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def offered(pools: RankPools, count: int, rank: int = 0) -> tuple[StoreBook, tuple[int, ...]]:
    blocks = pools[rank].allocate(count, "x")
    assert blocks is not None
    book = StoreBook(pools)
    for position, block in enumerate(blocks):
        book.offer(rank, name(position), position, block)
    return book, blocks


def test_an_eighth_of_the_blocks_is_written_at_a_time_in_two_parts() -> None:
    pools = RankPools(65)
    book, blocks = offered(pools, 20)
    first, second = book.begin()
    assert (first.block_ids, second.positions) == (blocks[:4], (4, 5, 6, 7))
    assert (book.begin(), book.check()) == ([], [])
    pools.free(0, blocks, "x")
    assert pools.num_used == 8
    book.stored(BlocksStored(first.store_id, (Place(0, 0), None, None, Place(0, 1))))
    assert (
        pools.num_used,
        book.counts[SKIPPED_BLOCKS],
        name(0) in book.index,
        name(1) in book,
        name(4) in book,
    ) == (4, 2, True, False, True)
    assert book.begin() == [], "the others waited without an owner, and their room was given back"
    assert book.counts[SKIPPED_BLOCKS] == 2 + 12
    assert book.check() == []


def test_what_waits_is_offered_once_and_too_much_is_skipped() -> None:
    pools = RankPools(65)
    book, blocks = offered(pools, 3)
    book.offer(0, name(1), 1, blocks[1])
    assert [len(list(split(store.names))) for store in book.begin()] == [3]
    for number in range(disk_stores.WAITING_BLOCKS + 5):
        book.offer(0, name(100 + number), number, blocks[0])
    assert book.counts[SKIPPED_BLOCKS] == 5
    assert book.check() == []


def test_a_lost_rank_takes_its_writes_with_it() -> None:
    pools = RankPools(65, 2)
    pools.reset(RankReset((), (0, 1), ("a", "b"), 1))
    book, _ = offered(pools, 20, rank=1)
    assert {store.rank for store in book.begin()} == {1}
    book.lose(1)
    assert (len(book), name(0) in book, name(19) in book, book.check()) == (0, False, False, [])
    assert book.owners(1) == []


def test_check_sees_a_miscount() -> None:
    book, _ = offered(RankPools(65), 2)
    book._names.add(name(77))
    assert book.check() == ["what waits for the disk is not what is named as such"]


def test_what_is_held_while_it_waits_is_given_up_for_others_the_oldest_first() -> None:
    pools = RankPools(65)
    blocks = pools[0].allocate(20, "x")
    assert blocks is not None
    book = StoreBook(pools, holds=True)
    for position, block in enumerate(blocks):
        book.offer(0, name(position), position, block)
    assert len(book.begin()) == 2  # Of 4 blocks each.
    assert book.give_up(0, 64) == 0, "somebody else owns them all the same"
    pools.free(0, blocks, "x")
    assert pools.num_used == 20
    assert book.give_up(0, 5) == 5
    assert (pools.num_used, book.counts[SKIPPED_BLOCKS]) == (15, 5)
    assert [name(number) in book for number in (7, 8, 12, 13)] == [True, False, False, True]
    owners = {(block, owner) for owner, owned in book.owners(0) for block in owned}
    assert owners == {(block, owner) for block, (owner,) in pools[0].owners().items()}
    assert book.check() == []

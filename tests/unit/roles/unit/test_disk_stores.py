"""Test blocks on their way to disk: few at a time, in order, none twice."""

from __future__ import annotations

from hadal.core.cache import SKIPPED_BLOCKS, DiskLocation, split
from hadal.core.plans import BlocksStored
from hadal.core.seams import RankReset
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit import disk_stores
from hadal.roles.unit.disk_stores import DiskStores


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def offered(pools: RankPools, count: int, rank: int = 0) -> tuple[DiskStores, tuple[int, ...]]:
    blocks = pools[rank].allocate(count, "x")
    assert blocks is not None
    membership = DiskStores(pools)
    for position, block in enumerate(blocks):
        membership.offer(rank, name(position), position, block)
    return membership, blocks


def test_an_eighth_of_the_blocks_is_written_at_a_time_in_two_parts() -> None:
    pools = RankPools(65)
    membership, blocks = offered(pools, 20)
    first, second = membership.begin()
    assert (first.block_ids, second.positions) == (blocks[:4], (4, 5, 6, 7))
    assert (membership.begin(), membership.check()) == ([], [])
    pools.free(0, blocks, "x")
    assert pools.num_used == 8
    membership.stored(
        BlocksStored(first.store_id, (DiskLocation(0, 0), None, None, DiskLocation(0, 1)))
    )
    found = (
        pools.num_used,
        membership.counts[SKIPPED_BLOCKS],
        name(0) in membership.index,
        name(1) in membership,
        name(4) in membership,
    )
    assert found == (4, 2, True, False, True)
    # The others had no owner while queued, and their blocks were freed.
    assert membership.begin() == []
    assert membership.counts[SKIPPED_BLOCKS] == 2 + 12
    assert membership.check() == []


def test_what_waits_is_offered_once_and_too_much_is_skipped() -> None:
    pools = RankPools(65)
    membership, blocks = offered(pools, 3)
    membership.offer(0, name(1), 1, blocks[1])
    assert [len(list(split(store.names))) for store in membership.begin()] == [3]
    for number in range(disk_stores.WAITING_BLOCKS + 5):
        membership.offer(0, name(100 + number), number, blocks[0])
    assert membership.counts[SKIPPED_BLOCKS] == 5
    assert membership.check() == []


def test_a_lost_rank_takes_its_writes_with_it() -> None:
    pools = RankPools(65, 2)
    pools.reset(RankReset((), (0, 1), ("a", "b"), 1))
    membership, _ = offered(pools, 20, rank=1)
    assert {store.rank for store in membership.begin()} == {1}
    membership.lose(1)
    found = (len(membership), name(0) in membership, name(19) in membership, membership.check())
    assert found == (0, False, False, [])
    assert membership.owners(1) == []


def test_check_sees_a_miscount() -> None:
    membership, _ = offered(RankPools(65), 2)
    membership._names.add(name(77))
    assert membership.check() == ["names differ from the blocks that wait for the disk"]


def test_what_is_held_while_it_waits_is_given_up_for_others_the_oldest_first() -> None:
    pools = RankPools(65)
    blocks = pools[0].allocate(20, "x")
    assert blocks is not None
    membership = DiskStores(pools, holds=True)
    for position, block in enumerate(blocks):
        membership.offer(0, name(position), position, block)
    assert len(membership.begin()) == 2  # Each write has 4 blocks.
    assert membership.give_up(0, 64) == 0, "somebody else owns them all the same"
    pools.free(0, blocks, "x")
    assert pools.num_used == 20
    assert membership.give_up(0, 5) == 5
    assert (pools.num_used, membership.counts[SKIPPED_BLOCKS]) == (15, 5)
    assert [name(number) in membership for number in (7, 8, 12, 13)] == [True, False, False, True]
    owners = {(block, owner) for owner, owned in membership.owners(0) for block in owned}
    assert owners == {(block, owner) for block, (owner,) in pools[0].owners().items()}
    assert membership.check() == []

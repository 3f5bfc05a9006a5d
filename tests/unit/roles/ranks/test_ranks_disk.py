"""Test disk reads and writes of a unit of many ranks: the rank that has the blocks executes them."""

from __future__ import annotations

from hadal.core.cache import DiskLocation
from hadal.core.messages.pools import Freed, Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.ranks import RankAnswered, RankDo
from hadal.core.messages.units import Cancel, UnitDown
from hadal.core.plans import BlocksRead, BlocksStored
from hadal.core.seams import Send, UsedBlocks
from tests.unit.roles.ranks.test_ranks import LEASE, Driver, to

NAMES = bytes(range(32))
PLACES = (DiskLocation(1, 2), DiskLocation(1, 3))
LOAD = ReadBlocks(4, NAMES, PLACES, (5, 6), rank=1)
STORE = StoreBlocks(4, NAMES, (0, 1), (7, 8), rank=2)


def asked() -> Driver:
    driver = Driver().run()
    driver.inner.answers = [LOAD, STORE, UsedBlocks(PLACES)]
    assert driver.handle(Cancel("x", 0))[:3] == [
        Send("decode-0.1", RankDo(LOAD)),
        Send("decode-0.2", RankDo(STORE)),
        UsedBlocks(PLACES),
    ]
    driver.inner.heard.clear()
    return driver


def test_the_inner_leader_hears_of_each_once_from_the_rank_that_was_asked() -> None:
    driver, loaded, stored = asked(), BlocksRead(4, 2), BlocksStored(4, PLACES)
    driver.handle(RankAnswered(2, "e2", loaded))  # Rank 2 was not asked for this read.
    driver.handle(RankAnswered(1, "e0", loaded))  # Another process of rank 1 was asked.
    driver.handle(RankAnswered(1, "e1", stored))  # Rank 1 was asked for read 4, not for write 4.
    assert driver.inner.heard == []
    for _ in range(2):
        driver.handle(RankAnswered(2, "e2", stored))
        driver.handle(RankAnswered(1, "e1", loaded))
    assert driver.inner.heard == [stored, loaded]
    assert driver.leader.num_stale == 5


def test_a_lost_rank_does_not_answer_and_the_others_do() -> None:
    driver = asked()
    driver.handle(UnitDown("decode-0.1", "killed"))
    driver.formed()
    driver.inner.heard.clear()
    driver.handle(RankAnswered(1, "e1", BlocksRead(4, 2)))
    assert driver.inner.heard == []
    driver.handle(RankAnswered(2, "e2", BlocksStored(4, PLACES)))
    assert driver.inner.heard == [BlocksStored(4, PLACES)]


def test_after_a_failed_step_nothing_is_copied_into_pools_before_the_next_generation() -> None:
    """A failed step's blocks count as free, but other ranks may still write them."""
    driver = Driver().run()
    driver.execute(0)
    driver.inner.answers = [Freed((5, 6), 1), LOAD, Pull("y", 0, LEASE, (7, 8), 2), STORE]
    effects = driver.done(0, 0, error="RuntimeError: no")
    assert not to(effects, ReadBlocks) + to(effects, Pull)
    assert (to(effects, Freed), to(effects, StoreBlocks)) == (["decode-0.1"], ["decode-0.2"])
    driver.inner.answers = [Pull("z", 0, LEASE, (9, 10), 2)]
    assert not to(driver.handle(Cancel("x", 0)), Pull)
    driver.handle(UnitDown("decode-0.1", "killed"))
    effects = driver.formed()
    assert (to(effects, ReadBlocks), to(effects, Pull)) == ([], ["decode-0.2", "decode-0.2"])
    driver.inner.answers = [Pull("w", 0, LEASE, (9, 10), 2)]
    assert to(driver.handle(Cancel("x", 0)), Pull) == ["decode-0.2"]


def test_a_read_that_waited_for_the_next_generation_is_answered() -> None:
    driver = Driver().run()
    driver.execute(0)
    driver.inner.answers = [LOAD]
    driver.done(0, 0, error="RuntimeError: no")
    assert to(driver.formed(), ReadBlocks) == ["decode-0.1"]
    driver.inner.heard.clear()
    driver.handle(RankAnswered(1, "e1", BlocksRead(4, 2)))
    assert driver.inner.heard == [BlocksRead(4, 2)]

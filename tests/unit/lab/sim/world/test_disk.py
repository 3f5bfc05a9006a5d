"""The disk of a simulated world: its contents, and the time of reads, one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.cache import NAME_BYTES, slice_of, split
from hadal.core.messages.pools import ReadBlocks, StoreBlocks
from hadal.core.plans import BlocksRead
from hadal.lab.sim.world.disk import DiskSpeed, WorldDisk
from hadal.lab.sim.world.requests import chain_of

BLOCK_BYTES = 1000.0


def disk(*num_blocks: int, **speed: float) -> WorldDisk:
    return WorldDisk(
        np.array(num_blocks, np.int64), BLOCK_BYTES, DiskSpeed(**{"read_bytes_per_s": 1e4, **speed})
    )


def load(num_blocks: int, rank: int = 0, read_id: int = 0) -> ReadBlocks:
    return ReadBlocks(read_id, chain_of(0, num_blocks), (), tuple(range(1, num_blocks + 1)), rank)


def test_what_is_there_is_found_up_to_the_first_that_is_not() -> None:
    view = disk(5, 0).view()
    chain = chain_of(0, 9)
    assert view.num_found(chain) == len(view.lookup(chain)) == 5
    assert view.num_found(slice_of(chain, 3, 9)) == 2
    assert (
        view.num_found(slice_of(chain, 5, 9))
        == view.num_found(b"")
        == view.num_found(chain_of(1, 3))
        == 0
    )
    assert slice_of(chain, 4, 5) in view
    assert slice_of(chain, 5, 6) not in view
    assert view.num_found(chain_of(99, 3)) == 0, "a request that there is not"
    assert view.find(bytes(range(NAME_BYTES))) is None, "another's name"


def test_all_that_is_there_is_found_in_whatever_order_it_is_asked_for() -> None:
    made = disk(5, 3)
    view = made.view()
    one, other = chain_of(0, 9), chain_of(1, 4)
    view.drop(slice_of(one, 4, 5))
    for names in (
        one,
        slice_of(one, 2, 9),
        slice_of(one, 6, 8),
        other + one,
        slice_of(one, 3, 4) + slice_of(one, 1, 2),
        slice_of(one, 0, 1) * 2,
        b"",
        bytes(range(NAME_BYTES)) + other,
        chain_of(99, 2),
    ):
        assert view.found(names) == tuple(
            place for name in split(names) if (place := view.find(name)) is not None
        )
    assert (len(view.found(one)), len(view.found(other + one))) == (4, 7)


def test_what_a_leader_did_not_find_it_does_not_look_for_again() -> None:
    made = disk(5)
    one, other = made.view(), made.view()
    chain = chain_of(0, 5)
    one.drop(slice_of(chain, 2, 3))
    assert (one.num_found(chain), other.num_found(chain)) == (2, 5)
    one.put(slice_of(chain, 2, 3), one.lookup(slice_of(chain, 0, 1)))
    assert one.num_found(chain) == 5


def test_what_is_written_is_found_by_all() -> None:
    made = disk(1)
    chain = chain_of(0, 4)
    one, other = made.view(), made.view()
    end_s, stored = made.store(
        2.0, "prefill-0", StoreBlocks(3, slice_of(chain, 1, 3), (1, 2), (8, 9), 0)
    )
    assert end_s == pytest.approx(2.0 + 2 * BLOCK_BYTES / DiskSpeed().write_bytes_per_s)
    one.put(slice_of(chain, 1, 3), stored.locations)
    assert (stored.store_id, one.num_found(chain), other.num_found(chain)) == (3, 3, 3)
    one.put(slice_of(chain, 3, 4), (None,))
    assert other.num_found(chain) == 3, "that one was not written"


def test_reads_of_a_node_wait_for_each_other_and_those_of_others_do_not() -> None:
    made = disk(9, latency_s=0.01)
    times = [
        made.load(1.0, unit, load(num, rank))[:2]
        for unit, rank, num in [
            ("prefill-0", 0, 5),
            ("prefill-0", 7, 3),
            ("prefill-0", 8, 3),
            ("prefill-1", 0, 1),
        ]
    ]
    assert times == [
        pytest.approx(pair) for pair in [(1.0, 1.51), (1.5, 1.81), (1.0, 1.31), (1.0, 1.11)]
    ]
    assert made.load(5.0, "prefill-0", load(1))[0] == 5.0, "done long ago"


def test_a_read_that_fails_brings_what_came_before() -> None:
    made = WorldDisk(
        np.array([9]), BLOCK_BYTES, DiskSpeed(read_bytes_per_s=1e4), lambda now_s, node, num: 2
    )
    begin_s, end_s, loaded = made.load(0.0, "prefill-0", load(5, read_id=4))
    assert loaded == BlocksRead(4, 2, 0, "input/output error")
    assert end_s - begin_s == pytest.approx(0.2)


def test_a_speed_that_is_none_is_refused() -> None:
    for wrong in ({"read_bytes_per_s": 0.0}, {"latency_s": -1.0}, {"node_ranks": 0}):
        with pytest.raises(ValueError, match="must be above 0"):
            DiskSpeed(**wrong)  # type: ignore[arg-type]

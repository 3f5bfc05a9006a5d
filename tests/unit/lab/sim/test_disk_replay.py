"""The ledgers of a disk cache's writer and of a leader that reads, driven by block names: finds,
evictions, and the agreement of both ledgers.
"""

from __future__ import annotations

from hadal.core.cache import NAME_BYTES, split
from hadal.lab.sim.day.disk_replay import POLL_S, DiskReplay
from hadal.policy.eviction import Lru


def chain(text: int, num_blocks: int) -> bytes:
    return b"".join((text << 32 | at).to_bytes(NAME_BYTES, "big") for at in range(num_blocks))


def test_a_prefix_is_found_as_far_as_it_was_written() -> None:
    disk = DiskReplay(100)
    assert disk.find(0.0, chain(1, 5)) == 0
    assert disk.store(chain(1, 5)) == (list(split(chain(1, 5))), [])
    assert disk.find(1.0, chain(1, 9)) == 5
    assert disk.find(1.0, chain(2, 5)) == 0
    # Only blocks after the first four are looked up, and only missing ones are written.
    assert disk.store(chain(1, 7), 4)[0] == list(split(chain(1, 7)))[5:]
    assert (disk.num_written, disk.num_runs) == (7, 2)
    assert disk.check() == []


def test_what_is_written_makes_what_was_not_used_go_the_deepest_first() -> None:
    disk = DiskReplay(10, Lru)
    disk.store(chain(1, 4))
    disk.store(chain(2, 4))
    assert disk.find(0.0, chain(1, 4)) == 4
    # At its next poll, before it needs capacity, the writer learns which blocks were used.
    disk.find(POLL_S, chain(3, 4))
    kept, gone = disk.store(chain(3, 4))
    assert len(kept) == 4
    assert gone == list(split(chain(2, 4)))[:1:-1]
    assert [disk.find(3.0, chain(text, 4)) for text in (1, 2, 3)] == [4, 2, 4]
    assert disk.check() == []


def test_what_does_not_fit_is_not_written() -> None:
    disk = DiskReplay(8)
    kept, gone = disk.store(chain(1, 20))
    assert (len(kept), gone) == (8, [])
    assert disk.find(0.0, chain(1, 20)) == 8
    assert disk.check() == []

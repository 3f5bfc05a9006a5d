"""Test the host with a real disk cache: a role learns where its blocks are stored, and reads them
back into other blocks.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hadal.core.cache import DiskLocation
from hadal.core.messages.pools import ReadBlocks, StoreBlocks
from hadal.core.messages.units import Cancel
from hadal.core.plans import BlocksRead, BlocksStored
from hadal.core.seams import DiskNews, Effect, Event, Send, UsedBlocks
from hadal.runtime.host import UnitHost
from hadal.runtime.process.clock import LiveClock
from hadal.runtime.side_work import SideParts
from hadal.runtime.store.disk import DiskStore
from hadal.runtime.store.view import DiskView
from hadal.runtime.transfer.pool import KvPool, pool_name, remove_shared_memory
from hadal.runtime.wire import ZmqWire
from tests.unit.runtime.test_host import Runner, World
from tests.waiting import DEADLINE_S

RUN = f"testhostdisk{os.getpid()}"
SHAPE = (8, 2, 64, 64)
NAMES = bytes(range(32))


class Script:
    """Leader that reads blocks back as soon as the folder reports their location."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.locations: tuple[DiskLocation, ...] = ()

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        self.events.append(event)
        match event:
            case DiskNews(added, locations) if added:
                order = sorted(range(len(locations)), key=lambda at: added[16 * at])
                self.locations = tuple(locations[at] for at in order)
                return [ReadBlocks(5, NAMES, self.locations, (4, 5))]
            case BlocksRead():
                return [UsedBlocks(self.locations), Send("front", Cancel("loaded", 0))]
        return []


def test_blocks_go_to_disk_are_told_of_and_come_back(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    script, clock = Script(), LiveClock()
    pool = KvPool.create(pool_name(RUN, "prefill-0", "1"), SHAPE)
    pool.blocks[1], pool.blocks[2] = 7, 9
    with tempfile.TemporaryDirectory(prefix="hadal-w-") as sockets:  # Sockets need a short path.
        wire, front = ZmqWire("prefill-0", Path(sockets)), ZmqWire("front", Path(sockets))
        host = UnitHost(
            script,
            Runner(),
            wire,
            SideParts(
                pool,
                make_disk=lambda wake: DiskStore(
                    tmp_path / "kv", "model", pool.blocks, 1 << 24, wake
                ),
                make_view=lambda wake: DiskView(tmp_path / "kv", "model", wake),
            ),
            clock,
            step_deadline_s=60,
        )
        world = World(script, host, front, pool, pool)  # type: ignore[arg-type]
        try:
            world.run(StoreBlocks(3, NAMES, (0, 1), (1, 2)))
            assert front.receive(DEADLINE_S) == [Cancel("loaded", 0)]
            assert (pool.blocks[4:6] == pool.blocks[1:3]).all()
            host.stop()
            world.join()
        finally:
            host.stop()
            host.close()
            front.close()
            remove_shared_memory(RUN)
    assert world.failure is None
    (stored,) = [event for event in script.events if isinstance(event, BlocksStored)]
    (loaded,) = [event for event in script.events if isinstance(event, BlocksRead)]
    assert (stored.store_id, stored.locations, stored.error) == (3, script.locations, None)
    assert (loaded.read_id, loaded.num_loaded) == (5, 2)


def test_a_role_without_a_disk_asks_for_none() -> None:
    pool = KvPool.create(pool_name(RUN, "prefill-1", "1"), SHAPE)
    with tempfile.TemporaryDirectory(prefix="hadal-w-") as sockets:
        wire = ZmqWire("prefill-1", Path(sockets))
        host = UnitHost(Script(), Runner(), wire, SideParts(pool), LiveClock(), step_deadline_s=60)
        try:
            with pytest.raises(TypeError, match="cannot apply the effect StoreBlocks"):
                host.run([StoreBlocks(3, NAMES, (0, 1), (1, 2))])
        finally:
            host.close()
            remove_shared_memory(RUN)

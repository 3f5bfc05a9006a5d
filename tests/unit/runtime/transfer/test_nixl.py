"""Test known problems of NIXL: threads that spin, and reads that never end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hadal.runtime.transfer import nixl, peers
from hadal.runtime.transfer.nixl import NixlAgent
from hadal.runtime.transfer.pool import KvPool, remove_shared_memory
from tests.needs import skip_unless
from tests.unit.runtime.kv_peers import RUN, Peer, is_written, lease_of, make_pool, wire_of
from tests.waiting import wait_until

pytestmark = [
    skip_unless(nixl.package() is not None, "no NIXL", "pip install nixl-cu13"),
    pytest.mark.more("what one transport needs watching for"),
]
NUM_BLOCKS = 130
IDS = tuple(range(1, NUM_BLOCKS))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[KvPool]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    made = make_pool(RUN, "decode-0", NUM_BLOCKS)
    yield made
    made.close()
    remove_shared_memory(RUN)


def states(pid: int) -> set[str]:
    """Return the states of a process's threads (proc(5)): "R" is runnable, "S" is waiting."""
    found = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(stat.read_text().rpartition(")")[2].split()[0])
    return found


def test_an_owner_nobody_reads_from_takes_no_core(pool: KvPool) -> None:
    with Peer("owner", RUN, "nixl", "127.0.0.1", NUM_BLOCKS) as owner:
        wait_until(lambda: states(owner.process.pid) == {"S"}, "all its threads wait")


def test_reads_that_never_end_cost_a_buffer_each_and_in_the_end_nixl(
    pool: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MAX_RETIRED", 2)
    monkeypatch.setattr(peers, "SHUN_S", 0.0)
    with Peer("owner", RUN, "nixl", "127.0.0.1", NUM_BLOCKS) as owner:
        wire = wire_of(pool, "nixl", lease_s=20.0)
        for _ in range(2):
            assert wire.pull(lease_of(owner.address, *IDS), IDS) is None
            assert wire.transport_of(owner.address) == "nixl"
            owner.process.send_signal(signal.SIGSTOP)
            with monkeypatch.context() as impatient:
                impatient.setattr(peers, "SILENCE_S", 0.3)
                assert "silent" in (wire.pull(lease_of(owner.address, *IDS), IDS) or "")
            pool.cache[:] = bytes([7]) * len(pool.cache)
            owner.process.send_signal(signal.SIGCONT)
            assert owner.ask("connections")  # The owner runs again.
            assert (pool.blocks == 7).all()
        assert wire.pull(lease_of(owner.address, *IDS), IDS) is None
        assert all(is_written(pool, i, i, 0) for i in IDS)
        assert wire.transport_of(owner.address) == "tcp"
        wire.close()


def test_an_agent_that_cannot_be_made_says_why(
    pool: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    about = NixlAgent("alone").about(pool)
    assert about.error
    monkeypatch.setattr(nixl, "_PACKAGES", ())
    assert "not installed" in NixlAgent("absent").about(pool).error

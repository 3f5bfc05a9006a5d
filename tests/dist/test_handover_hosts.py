"""KV transfer between two hosts (tests/dist/hosts.py) over a link of 400 Mbit/s.

Real hosts also differ in clocks and drivers, but KV transfer does not depend on them.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from hadal.runtime.transfer.nixl import package
from tests.dist.hosts import NEEDS_HOSTS, Host, Hosts, send_signal
from tests.needs import skip_unless
from tests.unit.runtime.kv_peers import RUN, Peer
from tests.waiting import wait_until

NUM_BLOCKS = 130
BLOCK_BYTES = 128 << 10
NETWORK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "e0", "UCX_LOG_LEVEL": "fatal"}
"""Environment for UCX, which would otherwise try shared memory, because both hosts have one kernel."""
NEEDS_NIXL = skip_unless(package() is not None, "nixl-cu13 is not installed", "make setup")
OVER_NETWORK = ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)]

pytestmark = [NEEDS_HOSTS, pytest.mark.more("tests/dist/test_hosts.py pulls KV between hosts")]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        for host in hosts:
            host.shape("tbf", "rate", "400mbit", "burst", "256kb", "latency", "100ms")
        yield hosts


@contextmanager
def peer(host: Host, what: str, handover: str, where: str) -> Iterator[Peer]:
    """Yield a peer process on a host."""
    prefix, blocks = host.prefix, NUM_BLOCKS
    with Peer(what, RUN, handover, where, blocks, prefix=prefix, environment=NETWORK) as found:
        try:
            yield found
        finally:
            with suppress(OSError, IndexError):  # It may have ended.
                send_signal(found.process, signal.SIGKILL)


def outcome(line: str) -> tuple[str | None, bool, str]:
    """Return (reason of the failure, whether the bytes are right, transport) of one pull."""
    error, is_right, transport = json.loads(line)
    return error, is_right, transport


@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_the_bytes_go_over_the_link(hosts: Hosts, handover: str) -> None:
    num_sent = hosts[0].num_bytes_sent()
    with (
        peer(hosts[0], "owner", handover, hosts[0].address) as owner,
        peer(hosts[1], "puller", handover, owner.address) as puller,
    ):
        outcomes = [outcome(puller.address), *(outcome(puller.read()) for _ in range(4))]
        num_sent = hosts[0].num_bytes_sent() - num_sent
    assert set(outcomes) == {(None, True, handover)}
    num_bytes = BLOCK_BYTES * (NUM_BLOCKS - 1)
    assert num_sent > len(outcomes) * num_bytes


@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_a_link_that_is_cut_is_noticed(hosts: Hosts, handover: str) -> None:
    """Killed and frozen ends are tested by tests/unit/runtime/transfer/test_kv.py."""
    with (
        peer(hosts[0], "owner", handover, hosts[0].address) as owner,
        peer(hosts[1], "puller", handover, owner.address) as puller,
    ):
        assert outcome(puller.address)[:2] == (None, True)
        num_sent = hosts[0].num_bytes_sent()
        in_the_middle = num_sent + BLOCK_BYTES * NUM_BLOCKS // 8
        wait_until(lambda: hosts[0].num_bytes_sent() > in_the_middle, "a pull is under way")
        hosts[0].unplug()

        def error() -> str | None:
            error, is_right, _ = outcome(puller.read())
            assert error is not None or is_right
            return error

        print(f"{handover}: {wait_until(error, 'a pull fails')}")

"""KV pulled between two hosts (tests/dist/hosts.py), with 400 Mbit/s between them.

Real hosts differ in their clocks and drivers, not in anything the hand-over looks at.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
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
"""The kernel is the same, so UCX would try shared memory between these hosts."""
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
    """A process on a host."""
    prefix, blocks = host.prefix, NUM_BLOCKS
    with Peer(what, RUN, handover, where, blocks, prefix=prefix, environment=NETWORK) as found:
        try:
            yield found
        finally:
            end(found)


def end(peer: Peer, number: int = signal.SIGKILL) -> None:
    """Send a signal to a peer, which may have ended."""
    with suppress(OSError, IndexError):
        send_signal(peer.process, number)


def outcome(line: str) -> tuple[str | None, bool, str]:
    """Return (why it failed, whether the bytes are right, transport) of one pull."""
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


@pytest.mark.promise(
    "Shared memory where both ends see the same file of it, else NIXL where both have it, else TCP"
)
@NEEDS_NIXL
def test_auto_is_nixl_between_hosts_and_shared_memory_within_one(hosts: Hosts) -> None:
    with peer(hosts[0], "owner", "auto", hosts[0].address) as owner:
        for host, transport in ((hosts[1], "nixl"), (hosts[0], "shm")):
            with peer(host, "puller", "auto", owner.address) as puller:
                assert outcome(puller.address) == (None, True, transport)


HOW: dict[str, Callable[[Hosts, Peer, Peer], None]] = {
    "owner is killed": lambda hosts, owner, puller: end(owner),
    "puller is killed": lambda hosts, owner, puller: end(puller),
    "owner is frozen": lambda hosts, owner, puller: end(owner, signal.SIGSTOP),
    "link is cut": lambda hosts, owner, puller: hosts[0].unplug(),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_if_one_goes_the_other_notices_and_keeps_nothing(
    hosts: Hosts, handover: str, how: str
) -> None:
    with (
        peer(hosts[0], "owner", handover, hosts[0].address) as owner,
        peer(hosts[1], "puller", handover, owner.address) as puller,
    ):
        assert outcome(puller.address)[:2] == (None, True)
        num_sent = hosts[0].num_bytes_sent()
        in_the_middle = num_sent + BLOCK_BYTES * NUM_BLOCKS // 8
        wait_until(lambda: hosts[0].num_bytes_sent() > in_the_middle, "a pull is under way")
        HOW[how](hosts, owner, puller)
        if how == "puller is killed":
            wait_until(lambda: owner.ask("connections") == "0", "the owner closes its connection")
            return

        def error() -> str | None:
            error, is_right, _ = outcome(puller.read())
            assert error is not None or is_right
            return error

        print(f"{handover}, {how}: {wait_until(error, 'a pull fails')}")

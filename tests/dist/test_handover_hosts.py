"""KV pulled between two hosts: network namespaces with a /dev/shm of their own each, and 400 Mbit/s
between them.

Needs root, ip and tc (Debian: iproute2). Real hosts differ in their clocks and drivers, not in
anything the hand-over looks at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hadal.runtime.transfer.nixl import package
from hadal.runtime.transfer.pool import remove_shared_memory
from tests.unit.runtime.kv_peers import RUN, Peer

ADDRESSES = ("10.97.0.1", "10.97.0.2")
NUM_BLOCKS = 130
SOON_S = 15.0
NETWORK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "e0", "UCX_LOG_LEVEL": "fatal"}
"""The kernel is the same, so UCX would try shared memory between these hosts."""
NEEDS_NIXL = pytest.mark.skipif(package() is None, reason="nixl-cu13 is not installed")
OVER_NETWORK = ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def can_make_hosts() -> bool:
    """Root may lack the right to make namespaces, as in most containers."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"hadal-probe-{os.getpid()}"
    made = (
        subprocess.run(
            ["ip", "netns", "add", name], capture_output=True, timeout=20, check=False
        ).returncode
        == 0
    )
    if made:
        run("ip", "netns", "delete", name)
    return made


pytestmark = [
    pytest.mark.skipif(
        not can_make_hosts(), reason="network namespaces need root, ip and tc (iproute2)"
    ),
    pytest.mark.timeout(180),
]


@dataclass(frozen=True)
class Hosts:
    names: tuple[str, str]

    def peer(self, host: int, what: str, handover: str, where: str) -> Peer:
        """A process there. The mounts of `ip netns exec` are its own, so the tmpfs is nobody
        else's.
        """
        prefix = (
            "ip",
            "netns",
            "exec",
            self.names[host],
            "/bin/sh",
            "-c",
            'mount -t tmpfs tmpfs /dev/shm && exec "$@"',
            "sh",
        )
        return Peer(what, RUN, handover, where, NUM_BLOCKS, prefix=prefix, environment=NETWORK)

    def unplug(self) -> None:
        run("ip", "-n", self.names[0], "link", "set", "e0", "down")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = (f"hadal-{os.getpid()}-0", f"hadal-{os.getpid()}-1")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            "e0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "e0",
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "e0")
            run("ip", "-n", name, "link", "set", "e0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("tbf", "rate", "400mbit", "burst", "256kb", "latency", "100ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "e0", "root", *shape)
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False
            )
        remove_shared_memory(RUN)


def outcome(line: str) -> tuple[float, str | None, bool, str]:
    """(seconds, why it failed, whether the bytes are right, transport) of one pull."""
    seconds, error, is_right, transport = json.loads(line)
    return seconds, error, is_right, transport


def first_error(puller: Peer) -> tuple[str, float]:
    """Read outcomes until one is an error: what it says and how long that pull took."""
    deadline_s = time.monotonic() + SOON_S
    while True:
        seconds, error, is_right, _ = outcome(puller.read())
        if error is not None:
            return error, seconds
        assert is_right
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_the_bytes_arrive_at_the_links_speed(
    hosts: Hosts, handover: str, record_property: Any
) -> None:
    with (
        hosts.peer(0, "owner", handover, ADDRESSES[0]) as owner,
        hosts.peer(1, "puller", handover, owner.address) as puller,
    ):
        outcomes = [outcome(puller.address), *(outcome(puller.read()) for _ in range(4))]
    assert all(error is None and is_right for _, error, is_right, _ in outcomes), outcomes
    assert {transport for *_, transport in outcomes} == {handover}
    num_bits = 8 * (NUM_BLOCKS - 1) * (128 << 10)
    mbit_per_s = num_bits / min(seconds for seconds, *_ in outcomes) / 1e6
    print(f"{handover}: {mbit_per_s:.0f} Mbit/s")
    record_property("mbit_per_s", mbit_per_s)
    assert mbit_per_s < 500, "the bytes did not go over the link"


@NEEDS_NIXL
def test_auto_is_nixl_between_hosts_and_shared_memory_within_one(hosts: Hosts) -> None:
    with hosts.peer(0, "owner", "auto", ADDRESSES[0]) as owner:
        with hosts.peer(1, "puller", "auto", owner.address) as puller:
            assert outcome(puller.address)[1:] == (None, True, "nixl")
        # A process of the same host sees its /dev/shm; nsenter takes mounts and network along.
        inside = ("nsenter", f"--target={owner.process.pid}", "--mount", "--net")
        with Peer(
            "puller", RUN, "auto", owner.address, NUM_BLOCKS, prefix=inside, environment=NETWORK
        ) as puller:
            assert outcome(puller.address)[1:] == (None, True, "shm")


@pytest.mark.parametrize(
    "how", ["owner is killed", "puller is killed", "owner is frozen", "link is cut"]
)
@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_whoever_goes_the_other_notices_and_keeps_nothing(
    hosts: Hosts, handover: str, how: str
) -> None:
    with (
        hosts.peer(0, "owner", handover, ADDRESSES[0]) as owner,
        hosts.peer(1, "puller", handover, owner.address) as puller,
    ):
        assert outcome(puller.address)[1:3] == (None, True)
        assert outcome(puller.read())[1:3] == (None, True)
        time.sleep(0.1)  # A pull takes a third of a second: this is in the middle of one.
        if how == "owner is killed":
            owner.process.kill()
        elif how == "puller is killed":
            puller.process.kill()
        elif how == "owner is frozen":
            owner.process.send_signal(19)
        else:
            hosts.unplug()
        if how == "puller is killed":
            deadline_s = time.monotonic() + SOON_S
            while owner.ask("connections") != "0":
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        else:
            error, seconds = first_error(puller)
            print(f"{handover}, {how}: after {seconds:.1f} s: {error}")
            assert seconds < SOON_S

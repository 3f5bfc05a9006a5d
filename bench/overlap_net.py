"""Two ranks as hosts of their own: network namespaces, joined by a link with a rate limit (`tc`).
Needs root and `tbf`.

Names contain the process id. Everything is removed at the end, also if the run fails; the next run
removes the remains of a killed one. `why_not` returns the reason if no link can be made here.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COMMAND_TIMEOUT_S = 20.0
GSO_BYTES = 65536
BURST_BYTES = 80_000
"""Burst of the rate limiter. It is larger than one GSO packet, because splitting packets costs CPU. It is
small, because after every pause a burst passes unlimited, which favours senders that pause.
"""
LINK = "e0"
"""Name of a host's end of its link."""
QUEUE_BYTES = 8_000_000
"""Queue of the rate limiter: no packet is dropped below it."""


class NetError(RuntimeError):
    """A command failed; its output is the message."""


@dataclass(frozen=True)
class Hosts:
    """Network namespaces, one per rank."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]

    def prefix(self, rank: int) -> list[str]:
        """Return the command prefix that runs a command as that host."""
        return ["ip", "netns", "exec", self.namespaces[rank]]

    def limit(self, bytes_per_s: float) -> None:
        """Set the rate of the link in each direction. Takes effect at once."""
        tbf = f"tbf rate {int(bytes_per_s * 8)}bit burst {BURST_BYTES} limit {QUEUE_BYTES}"
        for namespace in self.namespaces:
            _run(f"tc -n {namespace} qdisc replace dev {LINK} root {tbf}")


def why_not() -> str | None:
    """Return the reason why links cannot be made here; None if they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)."
    if os.geteuid() != 0:
        return "not root: network namespaces need it."
    try:
        with hosts() as two:
            two.limit(50e6)
    except NetError as error:
        return f"this kernel refuses: {error}"
    return None


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Make two namespaces and the link between them; remove them at the end. Raises NetError after
    removing what it made.
    """
    names = [f"hadal{os.getpid()}-{rank}" for rank in range(2)]
    _remove(_left_behind())
    atexit.register(_remove, names)
    # Without a handler, SIGTERM would end the process without any cleanup.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield _make(names)
    finally:
        _remove(names)
        atexit.unregister(_remove)
        signal.signal(signal.SIGTERM, before)


def _make(names: Sequence[str]) -> Hosts:
    for name in names:
        _run(f"ip netns add {name}")
        _run(f"ip -n {name} link set lo up")
    _run(f"ip -n {names[0]} link add {LINK} type veth peer name {LINK} netns {names[1]}")
    addresses = [f"10.77.0.{rank + 1}" for rank in range(2)]
    for name, address in zip(names, addresses, strict=True):
        _run(f"ip -n {name} addr add {address}/24 dev {LINK}")
        _run(f"ip -n {name} link set dev {LINK} gso_max_size {GSO_BYTES} up")
        _use_reno(name)
    return Hosts(tuple(names), tuple(addresses))


def _use_reno(namespace: str) -> None:
    """Select reno: bbr, the default of some hosts, paces by itself and hides the link's effect. The
    result is checked, because the kernel may refuse silently.
    """
    knob = "/proc/sys/net/ipv4/tcp_congestion_control"
    used = _run(f"ip netns exec {namespace} sh -c 'echo reno > {knob}; cat {knob}'").strip()
    if used != "reno":
        raise NetError(f"TCP uses {used}, not reno, in {namespace}.")


def _left_behind() -> list[str]:
    """Return the namespaces of killed runs: their process no longer exists."""
    names = [line.split()[0] for line in _run("ip netns list").splitlines() if line]
    owners = {name: re.fullmatch(r"hadal(\d+)-\w+", name) for name in names}
    return [
        name for name, owner in owners.items() if owner and not Path(f"/proc/{owner[1]}").exists()
    ]


def _remove(names: Sequence[str]) -> None:
    """Remove namespaces with their links. A namespace that does not exist is no error."""
    for name in names:
        subprocess.run(
            ["ip", "netns", "del", name],
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )


def _run(command: str) -> str:
    done = subprocess.run(
        shlex.split(command),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise NetError(f"{command}: {(done.stderr or done.stdout).strip()}")
    return done.stdout

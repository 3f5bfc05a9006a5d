"""Ranks as hosts of their own: network namespaces joined by links whose rate `tc` limits. Needs
root and `tbf`.

Two ranks are joined by one veth pair. More meet at a bridge in a further namespace, whose side of
each link is limited too: else what many send to one would be free. Names carry the process id, and
everything is removed at the end, also when the run fails; what a killed run left is removed by the
next. What this kernel cannot do is said by `why_not`.
"""

from __future__ import annotations

import atexit
import os
import re
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
"""More than one GSO packet, else each is cut in pieces at the cost of CPU; but little, because it
is free after every pause and would flatter whoever pauses.
"""
LINK = "e0"
"""A host's end of its link."""
QUEUE_BYTES = 8_000_000
"""Nothing is dropped before that much waits."""


class NetError(RuntimeError):
    """A command failed; its output is the message."""


@dataclass(frozen=True)
class Hosts:
    """One namespace a rank."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    """(namespace, device) of everything that is limited."""

    def prefix(self, rank: int) -> list[str]:
        """What a command is put behind to run as that host."""
        return ["ip", "netns", "exec", self.namespaces[rank]]

    def limit(self, bytes_per_s: float) -> None:
        """Set the rate of every link, each direction by itself. Takes effect at once."""
        for namespace, device in self.links:
            _run(
                "tc",
                "-n",
                namespace,
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                f"{int(bytes_per_s * 8)}bit",
                "burst",
                str(BURST_BYTES),
                "limit",
                str(QUEUE_BYTES),
            )


def why_not() -> str | None:
    """Why links cannot be made here; None if they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)."
    if os.geteuid() != 0:
        return "not root: network namespaces need it."
    try:
        with hosts(2) as two:
            two.limit(50e6)
    except NetError as error:
        return f"this kernel refuses: {error}"
    return None


@contextmanager
def hosts(num_ranks: int) -> Iterator[Hosts]:
    """Make the namespaces and links; remove them at the end. Raises NetError, having removed what
    was made.
    """
    stem = f"hadal{os.getpid()}"
    names = [f"{stem}-{rank}" for rank in range(num_ranks)]
    if num_ranks > 2:
        names.append(f"{stem}-s")
    _remove(_left_behind())
    atexit.register(_remove, names)
    # A plain SIGTERM would end the process without any of this.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield _make(names, num_ranks)
    finally:
        _remove(names)
        atexit.unregister(_remove)
        signal.signal(signal.SIGTERM, before)


def _make(names: Sequence[str], num_ranks: int) -> Hosts:
    for name in names:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
    devices = [(names[rank], LINK) for rank in range(num_ranks)]
    addresses = [f"10.77.0.{rank + 1}" for rank in range(num_ranks)]
    limited = list(devices)
    if num_ranks == 2:
        _run(
            "ip",
            "-n",
            names[0],
            "link",
            "add",
            LINK,
            "type",
            "veth",
            "peer",
            "name",
            LINK,
            "netns",
            names[1],
        )
    else:
        switch = names[-1]
        _run("ip", "-n", switch, "link", "add", "name", "hub", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "hub", "up")
        for rank in range(num_ranks):
            port = f"p{rank}"
            _run(
                "ip",
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                LINK,
                "netns",
                names[rank],
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "hub", "up")
            limited.append((switch, port))
    for (namespace, device), address in zip(devices, addresses, strict=True):
        _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
        _run(
            "ip",
            "-n",
            namespace,
            "link",
            "set",
            "dev",
            device,
            "gso_max_size",
            str(GSO_BYTES),
            "up",
        )
        _use_reno(namespace)
    return Hosts(tuple(names[:num_ranks]), tuple(addresses), tuple(limited))


def _use_reno(namespace: str) -> None:
    """bbr, some hosts' default, paces by itself and hides what the link does. Checked: a refusal
    may be silent.
    """
    knob = "/proc/sys/net/ipv4/tcp_congestion_control"
    used = _run(
        "ip", "netns", "exec", namespace, "sh", "-c", f"echo reno > {knob}; cat {knob}"
    ).strip()
    if used != "reno":
        raise NetError(f"TCP uses {used}, not reno, in {namespace}.")


def _left_behind() -> list[str]:
    """Namespaces of runs that were killed: their process is gone."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]
    owners = {name: re.fullmatch(r"hadal(\d+)-\w+", name) for name in names}
    return [
        name for name, owner in owners.items() if owner and not Path(f"/proc/{owner[1]}").exists()
    ]


def _remove(names: Sequence[str]) -> None:
    """Links go with their namespaces. One that was never made is no error."""
    for name in names:
        subprocess.run(
            ["ip", "netns", "del", name],
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )


def _run(*command: str) -> str:
    done = subprocess.run(
        list(command), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise NetError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout

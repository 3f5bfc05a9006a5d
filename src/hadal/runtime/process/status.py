"""`status.json` and `fleet.json` in the run folder: a run as operators, scripts and tests read it.

Written by the supervisor alone. Depends on the phases of nodes, but not on the code that starts and
watches processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hadal.core.overview import FleetSeen
from hadal.roles.nodes import NodePhase

STATUS_FILE = "status.json"
FLEET_FILE = "fleet.json"
"""File beside STATUS_FILE if there is a fleet: its decisions and their reasons."""


@dataclass(frozen=True)
class ProcessStatus:
    """Status of one child process. `pid` is 0 while it does not run."""

    role: str
    phase: str
    pid: int
    num_starts: int
    last_end: str = ""
    """Description of its last end; empty if it never ended."""
    host: str = ""
    """Host of its last start; empty for the supervisor's own host."""
    cores: tuple[int, ...] = ()
    """Logical cores, one per computing thread, used while other processes leave them free."""


@dataclass(frozen=True)
class ProcessEnd:
    """One end of a process, with its reason."""

    unix_s: float
    name: str
    reason: str
    is_asked: bool
    """True if the process was asked to end: nothing is wrong."""


@dataclass(frozen=True)
class NodeStatus:
    """One node of a cluster. `host` is empty until the node's agent has reported."""

    number: int
    phase: str
    host: str


@dataclass(frozen=True)
class RolloutStatus:
    """Progress of the last rollout."""

    number: int
    """Number of the rollout within this run, from 1."""
    model: str
    """Folder of the model that the new units serve."""
    num_units: int
    """Number of units to replace in all."""
    num_left: int
    """Number of units to replace or, if more, of starting units plus roles with failed starts."""
    num_failed: int = 0
    """Number of failed starts in a row, over all roles: above 0, no other unit is replaced."""


@dataclass(frozen=True)
class Status:
    """Status of one run. `ready`: every wanted process, except the console, is ready."""

    url: str
    run_id: str
    supervisor_pid: int
    ready: bool
    draining: bool
    elapsed_s: float
    """Time since the supervisor started."""
    processes: dict[str, ProcessStatus]
    nodes: tuple[NodeStatus, ...] = ()
    """Nodes of the cluster; empty without one."""
    nodes_wrong: str = ""
    """Reason why wanted nodes are missing, or why none can be added now; empty if all is well."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Hadal, Python and torch, by name."""
    rollout: RolloutStatus | None = None
    """The last rollout; None if there was none."""
    console_url: str = ""
    """URL of the console's pages; empty if there are none."""
    ends: tuple[ProcessEnd, ...] = ()
    """The last ends of processes, newest last."""


def wrong_nodes(status: Status) -> list[str]:
    """Return the problems of a cluster's nodes, one sentence each."""
    said = [
        f"node {node.number} ({node.host}) is lost."
        for node in status.nodes
        if node.phase == NodePhase.LOST
    ]
    return [*said, f"{status.nodes_wrong}."] if status.nodes_wrong else said


def write_status(folder: Path, status: Status) -> None:
    """Replace `status.json` atomically: a reader never sees half a file."""
    path = folder / f"{STATUS_FILE}.new"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
    path.rename(folder / STATUS_FILE)


def write_fleet(folder: Path, seen: FleetSeen) -> None:
    """Replace `fleet.json`, the fleet's decisions, atomically."""
    path = folder / f"{FLEET_FILE}.new"
    path.write_bytes(msgspec.json.encode(seen))
    path.rename(folder / FLEET_FILE)


def read_fleet(folder: Path) -> FleetSeen | None:
    """Return the last written state of the fleet, None if there is no fleet."""
    try:
        return msgspec.json.decode((folder / FLEET_FILE).read_bytes(), type=FleetSeen)
    except FileNotFoundError:
        return None


def read_status(folder: Path) -> Status | None:
    """Return the last status written, None if there is none yet."""
    try:
        return msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=Status)
    except FileNotFoundError:
        return None

"""`status.json` and `fleet.json` in the run folder: a run as operators, scripts and tests read it.

Written by the supervisor alone. Knows what a node's phase is, and nothing of how processes are
started and watched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hadal.core.overview import FleetSeen
from hadal.roles.nodes import NodePhase

STATUS_FILE = "status.json"
FLEET_FILE = "fleet.json"
"""Beside it, where there is a fleet: what it decides, and what for."""


@dataclass(frozen=True)
class ProcessStatus:
    """One child. `pid` 0: it does not run."""

    role: str
    phase: str
    pid: int
    num_starts: int
    last_end: str = ""
    """How it ended last; empty if it never did."""
    host: str = ""
    """Where it was started last; empty: on the supervisor's own host."""
    cores: tuple[int, ...] = ()
    """Logical cores that its computing threads take, one each, while nobody else wants them; empty:
    none.
    """


@dataclass(frozen=True)
class ProcessEnd:
    """One end of a process, and why."""

    unix_s: float
    name: str
    reason: str
    is_asked: bool
    """It was told to end: nothing is wrong."""


@dataclass(frozen=True)
class NodeStatus:
    """One node of a cluster. `host` is empty before an agent spoke there."""

    number: int
    phase: str
    host: str


@dataclass(frozen=True)
class RolloutStatus:
    """How far the last rollout is."""

    number: int
    """Of this run, from 1."""
    model: str
    """Folder of what the new units serve."""
    num_units: int
    """All that were to be replaced."""
    num_left: int
    """Those that are not replaced yet, by ones that are up."""
    num_failed: int = 0
    """Starts in a row that came to nothing: while there are any, no other unit is replaced."""


@dataclass(frozen=True)
class Status:
    """One run. `ready`: every process is."""

    url: str
    run_id: str
    supervisor_pid: int
    ready: bool
    draining: bool
    elapsed_s: float
    """Time since the supervisor began."""
    processes: dict[str, ProcessStatus]
    nodes: tuple[NodeStatus, ...] = ()
    """Of the cluster, if there is one."""
    nodes_wrong: str = ""
    """Why nodes that are wanted are not there, or none could be had now; empty if all is well."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of what it runs on."""
    rollout: RolloutStatus | None = None
    """None: there was none."""
    console_url: str = ""
    """Of the pages; empty: there are none."""
    ends: tuple[ProcessEnd, ...] = ()
    """The last ends of processes, the latest last."""


def wrong_nodes(status: Status) -> list[str]:
    """What is wrong with the nodes of a cluster, a sentence each."""
    said = [
        f"node {node.number} ({node.host}) is lost."
        for node in status.nodes
        if node.phase == NodePhase.LOST
    ]
    return [*said, f"{status.nodes_wrong}."] if status.nodes_wrong else said


def write_status(folder: Path, status: Status) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    path = folder / f"{STATUS_FILE}.new"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
    path.rename(folder / STATUS_FILE)


def write_fleet(folder: Path, seen: FleetSeen) -> None:
    """The same for what the fleet decides."""
    path = folder / f"{FLEET_FILE}.new"
    path.write_bytes(msgspec.json.encode(seen))
    path.rename(folder / FLEET_FILE)


def read_fleet(folder: Path) -> FleetSeen | None:
    """Return what the fleet was last, None if there is none."""
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

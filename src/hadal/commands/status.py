"""`hadal status`: state of the server on this host.

Reads the server's run folder, so it works even if the server hangs. Only the server's user can read
that folder.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hadal.core.errors import ConfigError
from hadal.core.messages.base import SUPERVISOR
from hadal.runtime.process.child import ProcessPhase
from hadal.runtime.process.process import FOLDER_PREFIX, RUN_FILE, is_listening, read_run
from hadal.runtime.process.status import ProcessStatus, Status, read_status, wrong_nodes
from hadal.runtime.topology import ProcessPlan, launch_plan, ranges, unit_and_rank

EXIT_INCOMPLETE = 1
"""Exit code if a part of the server is not ready."""
_ENDS = 3
"""Maximum number of a unit's processes for which the last end is shown."""


@dataclass(frozen=True)
class Found:
    """Run folder, status and planned processes of a running server."""

    folder: Path
    status: Status
    plans: tuple[ProcessPlan, ...]

    @property
    def up_s(self) -> float:
        """Seconds since the server started."""
        return time.time() - (self.folder / RUN_FILE).stat().st_mtime


SERVICE_FOLDER = Path("/run/hadal")
"""Run folder of a server that was installed as a service with deploy/."""


def find(run_folder: Path | None) -> Found:
    """Return the server that runs in this folder; None: the only one in this user's temporary
    folders and SERVICE_FOLDER. Raises ConfigError if there is none, or if there are several.
    """
    everywhere = [*Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"), SERVICE_FOLDER]
    running = {}
    for folder in sorted(everywhere) if run_folder is None else [run_folder]:
        # Skip other users' folders, and folders without a status yet.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            status = read_status(folder)
            if status is not None and is_listening(folder / f"{SUPERVISOR}.sock"):
                running[folder] = status
    if not running and run_folder is not None:
        raise ConfigError(f"{run_folder}: no `hadal serve` runs there.")
    if not running:
        raise ConfigError(
            "no `hadal serve` of this user runs on this host with a default run folder."
            " If the server was started with --run-folder, give the same folder here:"
            " --run-folder FOLDER."
        )
    if len(running) > 1:
        choices = " or ".join(f"--run-folder {folder}" for folder in running)
        raise ConfigError(f"{len(running)} servers run here. Choose one: {choices}.")
    ((folder, status),) = running.items()
    return Found(folder, status, launch_plan(read_run(folder).deployment))


def as_dict(found: Found) -> dict[str, Any]:
    """Return the status for --json."""
    where = {plan.name: plan for plan in found.plans}
    return {
        **asdict(found.status),
        "run_folder": str(found.folder),
        "up_s": round(found.up_s, 1),
        "wrong": wrong(found.status),
        "processes": {
            name: {**asdict(process), "node": where[name].node, "device": where[name].device}
            for name, process in found.status.processes.items()
        },
    }


def wrong(status: Status) -> list[str]:
    """Return current problems, one sentence each."""
    said = wrong_nodes(status)
    for name, process in status.processes.items():
        if process.phase in (ProcessPhase.READY, ProcessPhase.RESTING):
            continue
        why = f" ({process.last_end})" if process.last_end else ""
        said.append(f"{name} is {process.phase}{why}.")
    return said


def print_status(found: Found, *, as_json: bool) -> int:
    """Print the status and return the command's exit code."""
    if as_json:
        typer.echo(json.dumps(as_dict(found), indent=2))
    else:
        show(found, Console())
    return 0 if found.status.ready else EXIT_INCOMPLETE


def show(found: Found, console: Console) -> None:
    """Print lines about the server, a table of its units, and current problems."""
    status = found.status
    state = "draining" if status.draining else "ready" if status.ready else "not ready"
    console.print(
        f"[bold]{escape(status.url)}[/bold]  {state}, up {_duration(found.up_s)};"
        f" {', '.join(f'{name} {version}' for name, version in status.versions.items())}"
    )
    console.print(
        f"[dim]run folder {escape(str(found.folder))}, supervisor pid {status.supervisor_pid}[/dim]"
    )
    table = Table("unit", "nodes", "ready", "pids", "restarts", "last end", box=None)
    for unit, plans in units(found.plans).items():
        of_unit = {plan.name: status.processes[plan.name] for plan in plans}
        ends = [f"{name}: {one.last_end}" for name, one in of_unit.items() if one.last_end]
        more = f" and {len(ends) - _ENDS} more" if len(ends) > _ENDS else ""
        table.add_row(
            unit,
            _places(
                of_unit.values(), sorted({plan.node for plan in plans if plan.node is not None})
            ),
            _ready(of_unit.values()),
            ranges([process.pid for process in of_unit.values() if process.pid]),
            str(sum(max(0, process.num_starts - 1) for process in of_unit.values()) or ""),
            Text("; ".join(ends[:_ENDS]) + more),
        )
    console.print(table)
    if (rollout := status.rollout) is not None and rollout.num_left:
        console.print(
            f"rollout: {rollout.num_units - rollout.num_left} of {rollout.num_units} units serve"
            f" {escape(rollout.model)}"
        )
    for sentence in wrong(status):
        console.print(f"[yellow]{escape(sentence)}[/yellow]")


def _places(processes: Collection[ProcessStatus], nodes: Sequence[int]) -> str:
    """Return the numbers of a unit's nodes and, in a cluster, the names of their current hosts."""
    names = sorted({process.host for process in processes if process.host})
    return f"{ranges(nodes)} ({', '.join(names)})" if names else ranges(nodes)


def units(plans: Sequence[ProcessPlan]) -> dict[str, list[ProcessPlan]]:
    """Return name of a unit (or of a process outside units) -> its processes."""
    found: dict[str, list[ProcessPlan]] = {}
    for plan in plans:
        found.setdefault(unit_and_rank(plan.name)[0], []).append(plan)
    return found


def _ready(processes: Collection[ProcessStatus]) -> str:
    if all(process.phase == ProcessPhase.RESTING for process in processes):
        return "resting"
    num_ready = sum(process.phase == ProcessPhase.READY for process in processes)
    return f"{num_ready} of {len(processes)}"


def _duration(seconds: float) -> str:
    for limit, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * limit:
            return f"{seconds / limit:.0f} {unit}"
    return f"{seconds:.0f} s"

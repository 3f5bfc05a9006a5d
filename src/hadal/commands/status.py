"""`hadal status` and `hadal logs`: what runs on this host, and what its processes wrote last.

Reads the run folder of a server, which is its user's alone: nothing is asked of the server itself,
so both work when it does not answer.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hadal.core.config import ROLES
from hadal.core.errors import ConfigError
from hadal.core.messages import SUPERVISOR
from hadal.runtime.process.child import ProcessPhase, ProcessStatus, Status, read_status
from hadal.runtime.process.logs import LOGS_FOLDER, KeptLines
from hadal.runtime.process.process import FOLDER_PREFIX, RUN_FILE, is_heard, read_run
from hadal.runtime.topology import ProcessPlan, launch_plan, unit_of

EXIT_INCOMPLETE = 1
"""Something of the server is missing."""
FOLLOW_S = 0.2
"""How often `--follow` looks for new lines."""
_WRITTEN = re.compile(rb'(?:\{"time":")?(\d{4}-\d\d-\d\dT[\d:.]+Z)')


@dataclass(frozen=True)
class Found:
    """A server that runs."""

    folder: Path
    status: Status
    plans: tuple[ProcessPlan, ...]

    @property
    def up_s(self) -> float:
        """Since it was started."""
        return time.time() - (self.folder / RUN_FILE).stat().st_mtime


def find(run_folder: Path | None) -> Found:
    """The one server of that folder, or of this user's folders in the place for temporary files.
    Raises ConfigError if there is none, or if one must be chosen.
    """
    everywhere = Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")
    folders = sorted(everywhere) if run_folder is None else [run_folder]
    found = [folder for folder in folders if is_heard(folder / f"{SUPERVISOR}.sock")]
    running = [folder for folder in found if _status(folder) is not None]
    if not running and run_folder is not None:
        raise ConfigError(f"{run_folder}: no `hadal serve` runs there.")
    if not running:
        raise ConfigError(
            "no `hadal serve` of yours runs on this host with a run folder of its own. Name the"
            " folder of one that was given another: --run-folder FOLDER."
        )
    if len(running) > 1:
        choices = " or ".join(f"--run-folder {folder}" for folder in running)
        raise ConfigError(f"{len(running)} servers run here. Choose one: {choices}.")
    (folder,) = running
    status = _status(folder)
    assert status is not None
    return Found(folder, status, launch_plan(read_run(folder).deployment))


def _status(folder: Path) -> Status | None:
    """None: it has none yet, or is another user's."""
    try:
        return read_status(folder)
    except (OSError, msgspec.MsgspecError):
        return None


def as_dict(found: Found) -> dict[str, Any]:
    """For programs."""
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
    """What an operator should know, a sentence each."""
    said = []
    for name, process in status.processes.items():
        if process.phase in (ProcessPhase.READY, ProcessPhase.RESTING):
            continue
        why = f" ({process.last_end})" if process.last_end else ""
        said.append(f"{name} is {process.phase}{why}.")
    return said


def print_status(found: Found, *, as_json: bool) -> int:
    """Print it; returns the command's exit code."""
    if as_json:
        typer.echo(json.dumps(as_dict(found), indent=2))
    else:
        show(found, Console())
    return 0 if found.status.ready else EXIT_INCOMPLETE


def show(found: Found, console: Console) -> None:
    """A line on the server, a table of its units, and what is wrong."""
    status = found.status
    state = "draining" if status.draining else "ready" if status.ready else "not ready"
    console.print(
        f"[bold]{status.url}[/bold]  {state}, up {_duration(found.up_s)};"
        f" {', '.join(f'{name} {version}' for name, version in status.versions.items())}"
    )
    console.print(f"[dim]run folder {found.folder}, supervisor pid {status.supervisor_pid}[/dim]")
    table = Table("unit", "nodes", "ready", "pids", "started again", "last end", box=None)
    for unit, names in units(found.plans).items():
        processes = [status.processes[name] for name in names]
        nodes = sorted({plan.node for plan in found.plans if plan.name in names})
        ends = [
            f"{name}: {p.last_end}" for name, p in zip(names, processes, strict=True) if p.last_end
        ]
        table.add_row(
            unit,
            _range(nodes),
            _ready(processes),
            _range([process.pid for process in processes if process.pid]),
            str(sum(max(0, process.num_starts - 1) for process in processes) or ""),
            Text("; ".join(ends[:3]) + (f" and {len(ends) - 3} more" if len(ends) > 3 else "")),
        )
    console.print(table)
    for sentence in wrong(status):
        console.print(f"[yellow]{sentence}[/yellow]")


def units(plans: Sequence[ProcessPlan]) -> dict[str, list[str]]:
    """Names of the processes of each unit, and of each gateway."""
    found: dict[str, list[str]] = {}
    for plan in plans:
        unit = unit_of(plan.name)[0] if plan.role in ROLES else plan.name
        found.setdefault(unit, []).append(plan.name)
    return found


def _ready(processes: Sequence[ProcessStatus]) -> str:
    if all(process.phase == ProcessPhase.RESTING for process in processes):
        return "rests"
    num_ready = sum(process.phase == ProcessPhase.READY for process in processes)
    return f"{num_ready} of {len(processes)}"


def _range(numbers: Sequence[int]) -> str:
    """Neighbours are shortened."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _duration(seconds: float) -> str:
    for limit, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * limit:
            return f"{seconds / limit:.0f} {unit}"
    return f"{seconds:.0f} s"


# ---- what the processes wrote ----


def processes_of(found: Found, name: str | None) -> list[str]:
    """The processes that a name means: one, all of a unit, or all there are. Raises ConfigError for
    one that is not there.
    """
    every = [*found.status.processes, SUPERVISOR]
    if name is None:
        return every
    meant = units(found.plans).get(name, [name])
    if name not in every and meant == [name]:
        raise ConfigError(f"there is no {name!r}; these are: {', '.join(every)}.")
    return meant


def lines_of(found: Found, names: Sequence[str]) -> list[bytes]:
    """What is kept of their lines, in the order of their times."""
    entries: list[tuple[bytes, list[bytes]]] = []
    for name in names:
        for line in KeptLines.read(found.folder / LOGS_FOLDER, name):
            written = _WRITTEN.match(line)
            if written or not entries:
                entries.append((written[1] if written else b"", [line]))
            else:
                entries[-1][1].append(line)  # It belongs to the one before, as a traceback does.
    return [line for _, lines in sorted(entries, key=lambda entry: entry[0]) for line in lines]


def follow(found: Found, names: Sequence[str], is_over: Callable[[], bool]) -> Iterator[bytes]:
    """New lines of these processes as they come, until the server has ended."""
    tails = [KeptLines.tail(found.folder / LOGS_FOLDER, name) for name in names]
    while True:
        was_over = is_over()
        for tail in tails:
            yield from tail()
        if was_over:
            return
        time.sleep(FOLLOW_S)


def print_logs(found: Found, name: str | None, num_lines: int, *, is_followed: bool) -> None:
    """Print the last lines, and go on with new ones if that is asked for."""
    names = processes_of(found, name)
    out = sys.stdout.buffer
    new = follow(found, names, lambda: not is_heard(found.folder / f"{SUPERVISOR}.sock"))
    lines = lines_of(found, names)
    for line in lines[len(lines) - num_lines :] if num_lines < len(lines) else lines:
        out.write(line)
    out.flush()
    if not is_followed:
        return
    for line in new:
        out.write(line)
        out.flush()

"""`hadal replay`: repeat the decisions of a recorded live run, and compare each of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hadal.commands.examples import examples

if TYPE_CHECKING:
    from rich.console import Console

    from hadal.lab.sim.replay import ReplayReport
    from hadal.roles.recording import Opening, RecordedRole

EXIT_DIFFERENT = 1
EPILOG = examples(
    ("HADAL_RECORD=run1 hadal serve", "record a run: send requests, then end it with Ctrl-C"),
    ("hadal replay run1", "make all its decisions again and compare them"),
    ("hadal replay run1 --json", "print the report as JSON"),
    after=(
        "Exit code: 1 if a decision differs; the first one is shown. A recording contains"
        " prompts and answers."
    ),
)


def replay(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of the recording: the value of HADAL_RECORD when the server ran."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Give the events of a recorded live run to this version's roles, and compare every decision."""
    from hadal.lab.sim.replay import replay as replay_all
    from hadal.progress import Bar
    from hadal.runtime.recorder import read_recordings

    begun_s = time.perf_counter()
    with Bar("hadal replay", 1.0) as bar:
        bar.update("reading the recording")
        recordings = read_recordings(folder)
        report = replay_all(
            recordings,
            make_role,
            lambda done, of: bar.update(f"{done:,} of {of:,} calls", done=done / of),
        )
    took_s = time.perf_counter() - begun_s
    if as_json:
        typer.echo(json.dumps(as_dict(report, took_s), indent=2))
    else:
        from rich.console import Console

        show(report, took_s, Console())
    sys.exit(EXIT_DIFFERENT if report.difference else 0)


def make_role(opening: Opening) -> RecordedRole:
    """Make the role of a recorded process by the code that the process used. Raises ConfigError."""
    from hadal.core.messages.ranks import RankUp
    from hadal.roles import recording
    from hadal.roles.fleet.fleet import make_fleet
    from hadal.roles.front.front import Front
    from hadal.roles.leaders import make_leader
    from hadal.roles.ranks.rank import RankRole
    from hadal.roles.ranks.ranks import make_ranked_leader

    process, deployment, made = opening.process, opening.deployment, opening.made
    match made:
        case recording.MadeFront(epoch, max_context, fingerprint):
            return Front(deployment, epoch=epoch, max_context=max_context, fingerprint=fingerprint)
        case recording.MadeSoleLeader(role, epoch, pool, fingerprint, model):
            return make_leader(
                deployment, model, process, role, epoch, pool, fingerprint=fingerprint
            )
        case recording.MadeLeader(role, epoch, fingerprint, model):
            return make_ranked_leader(
                deployment, model, process, role, epoch, fingerprint=fingerprint
            )
        case recording.MadeRank(unit, rank, epoch, host, port, pool, expert_port):
            return RankRole(RankUp(unit, rank, epoch, host, port, pool, expert_port))
        case recording.MadeFleet(day_s):
            return make_fleet(deployment, day_s)


def as_dict(report: ReplayReport, took_s: float) -> dict[str, Any]:
    """Return the report for --json."""
    return {
        "is_same": report.difference is None,
        "difference": str(report.difference) if report.difference else None,
        "processes": report.num_processes,
        "calls": report.num_calls,
        "calls_recorded": report.num_recorded,
        "decisions": dict(report.decisions.most_common()),
        "events": dict(report.events.most_common()),
        "span_s": report.span_s,
        "took_s": took_s,
        "steps": {
            process: {"steps": number, "elapsed_ms": mean_ms}
            for process, (number, mean_ms) in report.step_ms.items()
        },
    }


def show(report: ReplayReport, took_s: float, console: Console) -> None:
    """Print the report as tables."""
    from rich.table import Table

    decisions = Table("decision", title="Decided again", title_justify="left")
    decisions.add_column("times", justify="right")
    for kind, number in report.decisions.most_common():
        decisions.add_row(kind, f"{number:,}")
    console.print(decisions)
    steps = Table("process", title="Steps as measured", title_justify="left")
    for column in ("steps", "mean ms"):
        steps.add_column(column, justify="right")
    for process, (number, mean_ms) in report.step_ms.items():
        steps.add_row(process, f"{number:,}", f"{mean_ms:.3f}")
    console.print(steps)
    events = ", ".join(f"{kind} {number:,}" for kind, number in report.events.most_common())
    console.print(f"[dim]Events: {events}.[/dim]", highlight=False)
    calls = f"{report.num_calls:,} of {report.num_recorded:,} calls of {report.num_processes} roles"
    times = f"{report.span_s:.1f} s live, {took_s:.1f} s replayed"
    if report.difference is None:
        console.print(
            f"[green]The same[/green]: {report.num_decisions:,} decisions in {calls} ({times})."
        )
    else:
        console.print(
            f"[red]Different[/red] after {report.num_decisions:,} decisions in {calls} ({times}):"
        )
        console.print(str(report.difference), highlight=False, markup=False)

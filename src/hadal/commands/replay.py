"""`hadal replay`: a recorded live run once more, in the simulator; whether every decision is the
same.
"""

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

    from hadal.roles.recording import Opening
    from hadal.sim.replay.relived import RelivedRole
    from hadal.sim.replay.replay import ReplayReport

EXIT_DIFFERENT = 1
EXIT_CONFIG = 2
EPILOG = examples(
    ("HADAL_RECORD=run1 hadal serve", "record; send it requests, then end it with Ctrl-C"),
    ("hadal replay run1", "decide it all again"),
    ("hadal replay run1 --json", "the same for programs"),
    after=(
        "It leaves with 1 if a decision differs, and says which was the first. A recording holds"
        " prompts and answers."
    ),
)


def replay(
    folder: Annotated[
        Path, typer.Argument(help="Folder that HADAL_RECORD named when the server ran.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Replay a recorded live run with this version's roles under simulated time, and compare every
    decision.
    """
    from hadal.core.errors import HadalError
    from hadal.progress import Bar
    from hadal.runtime.recorder import read_recordings
    from hadal.sim.replay.replay import replay as replay_all

    begun_s = time.perf_counter()
    try:
        with Bar("hadal replay", 1.0) as bar:
            bar.update("reading the recording")
            recordings = read_recordings(folder)
            report = replay_all(
                recordings,
                make_role,
                lambda done, of: bar.update(f"{done:,} of {of:,} calls", done=done / of),
            )
    except (HadalError, ValueError) as error:
        typer.echo(f"hadal replay: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    took_s = time.perf_counter() - begun_s
    if as_json:
        typer.echo(json.dumps(as_dict(report, took_s), indent=2))
    else:
        from rich.console import Console

        show(report, took_s, Console())
    sys.exit(EXIT_DIFFERENT if report.difference else 0)


def make_role(opening: Opening) -> RelivedRole:
    """The role that a recorded process hosted, made by the code that made it there. Raises
    ConfigError.
    """
    from hadal.roles import recording
    from hadal.roles.fleet import make_fleet
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
            return RankRole(unit, rank, epoch, host, port, pool, expert_port=expert_port)
        case recording.MadeFleet(day_s):
            return make_fleet(deployment, day_s)


def as_dict(report: ReplayReport, took_s: float) -> dict[str, Any]:
    """The report for programs."""
    return {
        "is_same": report.difference is None,
        "difference": str(report.difference) if report.difference else None,
        "processes": report.num_processes,
        "calls": report.num_calls,
        "calls_recorded": report.num_recorded,
        "decisions": dict(report.decisions.most_common()),
        "from_outside": dict(report.outside.most_common()),
        "messages_lost": report.num_lost,
        "span_s": report.span_s,
        "took_s": took_s,
        "steps": {
            name: {
                "steps": of.num_steps,
                "elapsed_ms": of.elapsed_ms,
                "answered_ms": of.answered_ms,
            }
            for name, of in report.steps.items()
        },
        "wire": [
            {
                "from": pair[0],
                "to": pair[1],
                "messages": way.num_messages,
                "median_ms": way.median_ms,
                "max_ms": way.max_ms,
            }
            for pair, way in report.ways.items()
        ],
    }


def show(report: ReplayReport, took_s: float, console: Console) -> None:
    """Print the report."""
    from rich.table import Table

    decisions = Table("decision", title="Decided again", title_justify="left")
    decisions.add_column("times", justify="right")
    for kind, number in report.decisions.most_common():
        decisions.add_row(kind, f"{number:,}")
    console.print(decisions)
    steps = Table("process", title="Steps as measured", title_justify="left")
    for column in ("steps", "in the runner, ms", "until heard of, ms"):
        steps.add_column(column, justify="right")
    for name, of in report.steps.items():
        steps.add_row(name, f"{of.num_steps:,}", f"{of.elapsed_ms:.3f}", f"{of.answered_ms:.3f}")
    console.print(steps)
    ways = Table(
        "from", "to", title="Messages as measured, from decision to decision", title_justify="left"
    )
    for column in ("messages", "median ms", "most ms"):
        ways.add_column(column, justify="right")
    for (sender, receiver), way in report.ways.items():
        ways.add_row(
            sender, receiver, f"{way.num_messages:,}", f"{way.median_ms:.3f}", f"{way.max_ms:.1f}"
        )
    console.print(ways)
    given = ", ".join(f"{kind} {number:,}" for kind, number in report.outside.most_common())
    lost = f"Messages that reached nobody: {report.num_lost}."
    console.print(f"[dim]From outside: {given}. {lost}[/dim]", highlight=False)
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

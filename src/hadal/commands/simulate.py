"""Options of `hadal simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hadal.commands.examples import examples

SIMULATE_PRESET = "deepseek-day"
EPILOG = examples(
    ("hadal simulate", "the day that DeepSeek published, into the folder hadal-day"),
    (
        "hadal simulate --hardware h200 --gpu-hour-usd 2.5 --out h200",
        "the same day on other GPUs",
    ),
    (
        "hadal simulate --no-windows --no-what-ifs",
        "in a minute: the fleet as a fluid, no request by itself",
    ),
    (
        "hadal simulate --hours 14,22 --window 30",
        "half a minute of two hours (Beijing), request by request",
    ),
    (
        "hadal simulate --print-config > day.toml; hadal simulate --config day.toml",
        "anything else",
    ),
    after=(
        "DIR/report.html shows it, DIR/result.json holds it, DIR/step.trace.json is a step for"
        " ui.perfetto.dev."
    ),
)


def simulate(
    preset: Annotated[
        str, typer.Option(help="What to begin with: deepseek-day.")
    ] = SIMULATE_PRESET,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file of what is different; --print-config shows all of it."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for result.json, report.html and step.trace.json.")
    ] = Path("hadal-day"),
    window: Annotated[
        float | None,
        typer.Option(
            help="Seconds of every hour in which every request is one. [dim]4[/dim]", min=0.5
        ),
    ] = None,
    hours: Annotated[
        str,
        typer.Option(
            help="Hours in Beijing to look at like that, such as 0-5,14. [dim]all 24[/dim]"
        ),
    ] = "",
    no_windows: Annotated[bool, typer.Option("--no-windows", help="Look at none.")] = False,
    no_what_ifs: Annotated[
        bool, typer.Option("--no-what-ifs", help="Leave out the alternatives.")
    ] = False,
    hardware: Annotated[
        str | None, typer.Option(help="h800, h20, h100, h200, b200 or gb200.")
    ] = None,
    gpu_hour_usd: Annotated[
        float | None, typer.Option(help="Rent of a GPU for an hour.", min=0)
    ] = None,
    prices: Annotated[
        str | None, typer.Option(help="A price list, or HIT/MISS/OUT dollars per million.")
    ] = None,
    cache_pb: Annotated[
        float | None, typer.Option(help="Petabytes of the KV cache on disk; 0: none.", min=0)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed makes the same day.", min=0, max=2**63 - 1)
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Processes at once; 0: as many as there are cores.", min=0, max=512)
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print result.json instead of tables.")
    ] = False,
    frames: Annotated[
        Path | None,
        typer.Option(
            help="Write seconds of the peak, 278 nodes, for `hadal console --frames`, and leave."
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all that can be set, as TOML, and leave.")
    ] = False,
) -> None:
    """Simulate a day of DeepSeek-V3/R1's fleet: nodes, speeds, cache, cost and income, hour by
    hour.
    """
    from hadal.lab.simulate.files import read_study, study_toml
    from hadal.lab.simulate.run import SimulateOptions, run

    study = read_study(
        preset,
        config,
        {
            "hardware": hardware,
            "gpu_hour_usd": gpu_hour_usd,
            "prices": prices,
            "cache.disk_pb": cache_pb,
            "seed": seed,
            "window.seconds": window,
        },
    )
    if print_config:
        typer.echo(study_toml(study), nl=False)
        return
    if frames is not None:
        from hadal.gateway.desk.frames import write_frames
        from hadal.lab.simulate.frames import PEAK_UNIX_S, world_frames

        write_frames(frames, world_frames(study, PEAK_UNIX_S))
        typer.echo(f"Written: {frames}. Look at it with: hadal console --frames {frames}")
        return
    run(
        SimulateOptions(
            study, out, "" if no_windows else hours or "0-23", not no_what_ifs, jobs, as_json
        )
    )

"""Options of `hadal simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hadal.commands.examples import examples

SIMULATE_PRESET = "deepseek-day"
EPILOG = examples(
    (
        "hadal simulate",
        "simulate the day that DeepSeek published; write results to the folder hadal-day",
    ),
    (
        "hadal simulate --hardware h200 --gpu-hour-usd 2.5 --out h200",
        "the same day on other GPUs",
    ),
    (
        "hadal simulate --no-windows --no-what-ifs",
        "simulate requests as a continuous flow only; takes a minute",
    ),
    (
        "hadal simulate --hours 14,22 --window 30",
        "simulate single requests for 30 s in each of two hours (Beijing time)",
    ),
    (
        "hadal simulate --print-config > day.toml; hadal simulate --config day.toml",
        "change any other setting",
    ),
    after=(
        "Results: DIR/report.html for a browser, DIR/result.json, and DIR/step.trace.json"
        " (one step, for ui.perfetto.dev)."
    ),
)


def simulate(
    preset: Annotated[
        str, typer.Option(help="Preset to start from: deepseek-day.")
    ] = SIMULATE_PRESET,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with settings that override the preset; --print-config prints them all."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for result.json, report.html and step.trace.json.")
    ] = Path("hadal-day"),
    window: Annotated[
        float | None,
        typer.Option(help="Seconds per hour simulated request by request. [dim]4[/dim]", min=0.5),
    ] = None,
    hours: Annotated[
        str,
        typer.Option(
            help="Hours (Beijing time) that have such a window, such as 0-5,14. [dim]all 24[/dim]"
        ),
    ] = "",
    no_windows: Annotated[
        bool,
        typer.Option(
            "--no-windows", help="Skip the windows that are simulated request by request."
        ),
    ] = False,
    no_what_ifs: Annotated[
        bool, typer.Option("--no-what-ifs", help="Omit the what-if variants.")
    ] = False,
    hardware: Annotated[
        str | None, typer.Option(help="GPU type: h800, h20, h100, h200, b200 or gb200.")
    ] = None,
    gpu_hour_usd: Annotated[
        float | None, typer.Option(help="Rent per GPU-hour, dollars.", min=0)
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(help="Name of a price list, or dollars per million tokens as HIT/MISS/OUT."),
    ] = None,
    cache_pb: Annotated[
        float | None, typer.Option(help="Size of the KV cache on disk, petabytes; 0: none.", min=0)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the simulation; equal seeds give equal days.", min=0, max=2**63 - 1
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Number of processes; 0: one per core.", min=0, max=512)
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print result.json instead of tables.")
    ] = False,
    frames: Annotated[
        Path | None,
        typer.Option(
            help="Record some seconds of the peak hour (278 nodes) for `hadal console"
            " --frames`, and exit."
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings as TOML, and exit.")
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

"""Options of `hadal plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hadal.commands.examples import examples

PLAN_SLO = "ttft=2s,tpot=50ms"
EPILOG = examples(
    (
        "hadal plan --slo ttft=2s,tpot=50ms --hardware h800 --out plans",
        (
            "plan for DeepSeek's published day on H800: a table of the candidates, and"
            " deployment files in plans/"
        ),
    ),
    (
        (
            "hadal plan --example-traffic > traffic.toml\n"
            "hadal plan --traffic traffic.toml --hardware h200,h20 --price h20=1.2"
        ),
        ("plan for your traffic; H20 and B200 have no reliable price and need one with --price"),
    ),
    (
        "hadal plan --traffic mooncake.jsonl.gz --slo ttft_p99=5s,tpot=40ms",
        ("use a trace's rate, lengths and cache hits; ttft_p99 limits a percentile, ttft the mean"),
    ),
    (
        "hadal plan --mtp-tokens 1 --no-verify --json",
        "with speculative decoding, by the step model alone, as JSON",
    ),
    (
        "hadal serve --config plans/1_*.toml --model FOLDER --dry-run",
        "show the processes of the cheapest plan and where they would run",
    ),
)


def plan(
    traffic: Annotated[
        Path | None,
        typer.Option(
            help="Traffic: a .toml file, or a trace (Mooncake's .jsonl[.gz] or Azure's .csv)."
            " [dim]DeepSeek's day[/dim]"
        ),
    ] = None,
    slo: Annotated[
        str,
        typer.Option(
            help="Latency limits in the busiest hour: means, or percentiles as ttft_p99=..."
        ),
    ] = PLAN_SLO,
    hardware: Annotated[
        str,
        typer.Option(
            help="Hardware to compare: some of h800,h20,h100,h200,b200,gb200. [dim]all with a"
            " price[/dim]"
        ),
    ] = "",
    price: Annotated[
        list[str] | None,
        typer.Option(help="Dollars per GPU-hour, such as h20=1.2. May be given more than once."),
    ] = None,
    mtp_tokens: Annotated[
        int, typer.Option(help="Speculative tokens per decode step.", min=0, max=3)
    ] = 0,
    mtp_accept: Annotated[
        float, typer.Option(help="Share of speculative tokens that is accepted.", min=0, max=1)
    ] = 0.8,
    experts: Annotated[
        str, typer.Option(help="Type of the routed experts' weights: fp8 or fp4.")
    ] = "fp8",
    static: Annotated[
        bool, typer.Option("--static", help="Run the peak's units all day, without autoscaling.")
    ] = False,
    start: Annotated[float, typer.Option(help="Start-up time of a unit, seconds.", min=1)] = 600.0,
    verify: Annotated[
        int, typer.Option(help="Number of plans to simulate, cheapest first.", min=0, max=20)
    ] = 1,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip the simulation; use the step model alone.")
    ] = False,
    top: Annotated[int, typer.Option(help="Number of plans to show and write.", min=1, max=50)] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Folder for deployment files and plan.json.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder with config.json; its path is written into the deployment files."
            " [dim]DeepSeek-V3[/dim]"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the simulated requests.", min=0, max=2**63 - 1)
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print plan.json instead of tables.")
    ] = False,
    example_traffic: Annotated[
        bool,
        typer.Option("--example-traffic", help="Print a traffic file with all fields, and exit."),
    ] = False,
) -> None:
    """Find the cheapest deployments of DeepSeek-V3/R1 for a traffic and latency limits, and show
    why other plans lose.
    """
    from hadal.lab.plan.run import PlanOptions, run
    from hadal.lab.sim.plan.traffic import EXAMPLE

    if example_traffic:
        typer.echo(EXAMPLE, nl=False)
        return
    run(
        PlanOptions(
            traffic,
            slo,
            hardware,
            tuple(price or ()),
            mtp_tokens,
            mtp_accept,
            experts,
            static,
            start,
            0 if no_verify else verify,
            top,
            out,
            model,
            seed,
            as_json,
        )
    )

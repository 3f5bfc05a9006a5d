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
            "DeepSeek's published day on H800: a table of what was tried, and deployments to run in"
            " plans/"
        ),
    ),
    (
        (
            "hadal plan --example-traffic > traffic.toml\n"
            "hadal plan --traffic traffic.toml --hardware h200,h20 --price h20=1.2"
        ),
        (
            "your traffic; H20 and B200 have no trustworthy price, so they are planned with if one"
            " is given"
        ),
    ),
    (
        "hadal plan --traffic mooncake.jsonl.gz --slo ttft_p99=5s,tpot=40ms",
        (
            "rate, lengths and hits of a trace; a percentile is promised with ttft_p99, without one"
            " it is the mean"
        ),
    ),
    (
        "hadal plan --mtp-tokens 1 --no-verify --json",
        "with drafts, by the step model alone, for programs",
    ),
    (
        "hadal serve --config plans/1_*.toml --model FOLDER --dry-run",
        "what the cheapest would run where",
    ),
)


def plan(
    traffic: Annotated[
        Path | None,
        typer.Option(
            help="A .toml, Mooncake's .jsonl[.gz] or Azure's .csv. [dim]DeepSeek's day[/dim]"
        ),
    ] = None,
    slo: Annotated[
        str, typer.Option(help="What the busiest hour keeps, means; ttft_p99=... for a percentile.")
    ] = PLAN_SLO,
    hardware: Annotated[
        str,
        typer.Option(
            help="h800,h20,h100,h200,b200,gb200: some of them. [dim]all that have a price[/dim]"
        ),
    ] = "",
    price: Annotated[
        list[str] | None, typer.Option(help="Dollars per GPU-hour, h20=1.2; may be given again.")
    ] = None,
    mtp_tokens: Annotated[
        int, typer.Option(help="Tokens that decode drafts a step.", min=0, max=3)
    ] = 0,
    mtp_accept: Annotated[
        float, typer.Option(help="Share of drafts that is accepted.", min=0, max=1)
    ] = 0.8,
    experts: Annotated[str, typer.Option(help="Weights of routed experts: fp8 or fp4.")] = "fp8",
    static: Annotated[
        bool, typer.Option("--static", help="The peak's units all day, instead of a fleet.")
    ] = False,
    start: Annotated[
        float, typer.Option(help="Seconds until a unit that is started works.", min=1)
    ] = 600.0,
    verify: Annotated[
        int, typer.Option(help="Plans to simulate, the cheapest first.", min=0, max=20)
    ] = 1,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Trust the step model.")] = False,
    top: Annotated[int, typer.Option(help="Plans to show and to write.", min=1, max=50)] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for deployments and plan.json.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder with config.json; written into deployments. [dim]DeepSeek-V3[/dim]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the simulated requests.", min=0, max=2**63 - 1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan.json.")] = False,
    example_traffic: Annotated[
        bool,
        typer.Option(
            "--example-traffic", help="Print a traffic file with all its fields, and leave."
        ),
    ] = False,
) -> None:
    """Find the cheapest deployments of DeepSeek-V3/R1 for a traffic and a promise on latency; say
    why others lose.
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

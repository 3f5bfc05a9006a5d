"""`hadal bench`: load a server at request rates or concurrencies, and measure it meanwhile.
Imports its dependencies only when called.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hadal.commands.address import URL, server_url
from hadal.commands.examples import examples
from hadal.core.errors import ConfigError

if TYPE_CHECKING:
    from hadal.apps.bench.load import Level

EPILOG = examples(
    ("hadal bench", "load the server on this machine with 1, 4 and 16 requests at once"),
    (
        "hadal bench http://other:8000 --rate 1,2,4 --slo ttft=2s,tpot=50ms",
        "random arrivals at 1, 2 and 4 requests/s, and the share that met the SLO",
    ),
    (
        "hadal bench --concurrency 32 --input lognormal:800:1 --output 50-200",
        "prompts of 800 tokens on average, with a standard deviation of 800; answers of 50 to 200",
    ),
    (
        "hadal bench --trace mooncake.jsonl.gz --speed 0.1 --duration 300",
        "the first 300 s of a trace at a tenth of its speed, with the prefixes that its"
        " requests share",
    ),
    (
        "hadal bench --rate 2 --shared 400 --json | jq .levels",
        "measure with a shared prefix; JSON for programs",
    ),
    after=(
        "--rate is an open load: requests are sent at their arrival times, whether others"
        " have finished or not, and latency counts from then. --concurrency is a closed"
        " load: each request is sent when another finishes. TTFT is the time to the first"
        " text, TPOT the mean time per token after it, ITL the time between two pieces of"
        " text, E2E the time to the end. Goodput counts requests that met every limit of"
        " --slo. Ctrl-C shows the results so far. Exit code: 0; 1 if no request was"
        " answered, 2 if the run could not begin, 130 if it was stopped."
    ),
)


def bench(
    url: Annotated[
        str,
        typer.Argument(help="URL of the server, with or without /v1.", callback=server_url),
    ] = URL,
    rate: Annotated[
        str, typer.Option(help="Request rates per second, one level each, such as 0.5,1,2.")
    ] = "",
    concurrency: Annotated[
        str,
        typer.Option(
            help="Numbers of concurrent requests, one level each. [dim]1,4,16 without --rate[/dim]"
        ),
    ] = "",
    duration: Annotated[
        float,
        typer.Option(help="Seconds during which a level sends requests.", min=0.5, max=86_400),
    ] = 30.0,
    requests: Annotated[
        int | None,
        typer.Option(help="Maximum number of requests per level. [dim]no limit[/dim]", min=1),
    ] = None,
    tokens_in: Annotated[
        str,
        typer.Option(
            "--input",
            help=(
                "Tokens per prompt: 200, 100-400, normal:MEAN:SPREAD,"
                " lognormal:MEAN:VARIATION or exponential:MEAN."
            ),
        ),
    ] = "200",
    tokens_out: Annotated[
        str, typer.Option("--output", help="Tokens per answer, in the same form as --input.")
    ] = "100",
    shared: Annotated[
        int, typer.Option(help="Tokens of a prefix that all prompts share, for the cache.", min=0)
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Trace file: Mooncake's .jsonl[.gz] or Azure's .csv. It sets the lengths,"
                " and without --rate and --concurrency the arrival times."
            )
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="Replay speed of a trace: 2 is twice as fast.", min=1e-4, max=1e4)
    ] = 1.0,
    scale: Annotated[
        float, typer.Option(help="Factor on a trace's lengths.", min=1e-4, max=1e3)
    ] = 1.0,
    slo: Annotated[
        str,
        typer.Option(
            help="Latency limits such as ttft=2s,tpot=50ms; itl and e2e may have one, too."
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Name of the model. [dim]the first one the server lists[/dim]")
    ] = "",
    endpoint: Annotated[str, typer.Option(help="Endpoint to load: chat or completions.")] = "chat",
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
    warm_up: Annotated[
        int,
        typer.Option(help="Warm-up requests before the first level, not measured.", min=0, max=256),
    ] = 4,
    timeout: Annotated[
        float, typer.Option(help="Time limit per request, seconds.", min=0.1, max=86_400)
    ] = 120.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the requests. A repeated seed repeats prompts, which may then be"
            " cached. [dim]random[/dim]",
            min=0,
            max=2**63 - 1,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.json and bench.html. [dim]none[/dim]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print bench.json instead of tables.")
    ] = False,
) -> None:
    """Load a server that speaks OpenAI's API, Hadal's or another, and measure latency, throughput
    and goodput.
    """
    from hadal.apps.bench.lengths import parse_lengths, read_trace
    from hadal.apps.bench.load import LoadPlan
    from hadal.apps.bench.request import Target
    from hadal.apps.bench.run import BenchOptions, run
    from hadal.apps.bench.texts import Texts
    from hadal.apps.bench.values import parse_promises

    if endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint is {endpoint!r}; use chat or completions.")
    found = read_trace(trace, scale) if trace is not None else None
    asked = BenchOptions(
        Target(
            url.rstrip("/").removesuffix("/v1") + "/v1",
            model,
            api_key,
            endpoint,
            timeout_s=timeout,
        ),
        Texts(0, num_shared=shared, part_tokens=max(1, round(512 * scale))),
        LoadPlan(
            duration,
            requests or sys.maxsize,
            parse_lengths(tokens_in, "--input"),
            parse_lengths(tokens_out, "--output"),
            found,
        ),
        tuple(_levels(rate, concurrency, speed if found is not None else None)),
        warm_up,
        parse_promises(slo),
        seed,
        out,
        as_json,
        {"input": tokens_in, "output": tokens_out, "trace": str(trace) if trace else None},
    )
    sys.exit(run(asked))


def _levels(rate: str, concurrency: str, speed: float | None) -> list[Level]:
    """Return the levels of load. `speed`: replay speed of a trace; None: there is no trace. Raises
    ConfigError.
    """
    from hadal.apps.bench.load import Level

    if not rate and not concurrency:
        if speed is not None:
            return [Level("trace", speed)]
        concurrency = "1,4,16"
    levels = [Level("rate", value) for value in _numbers(rate, "--rate", 1e-3, 1e5)]
    for value in _numbers(concurrency, "--concurrency", 1, 4096):
        if value != int(value):
            raise ConfigError(f"--concurrency is {value:g}; use whole numbers.")
        levels.append(Level("concurrency", value))
    return levels


def _numbers(text: str, option: str, low: float, high: float) -> list[float]:
    values: list[Any] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            values.append(float(part))
        except ValueError:
            values.append(part)
    bad = [value for value in values if not isinstance(value, float) or not low <= value <= high]
    if bad:
        raise ConfigError(
            f"{option}: {json.dumps(bad[0])} is not a number from {low:g} to {high:g};"
            " write a list such as 1,2,4."
        )
    return values

"""`hadal bench`: load on a server, at rates and at concurrencies, and measurements under it.
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
    ("hadal bench", "the server on this machine, with 1, 4 and 16 requests at once"),
    (
        "hadal bench http://other:8000 --rate 1,2,4 --slo ttft=2s,tpot=50ms",
        "requests that come by chance, so many a second, and how many of them were served in time",
    ),
    (
        "hadal bench --concurrency 32 --input lognormal:800:1 --output 50-200",
        "prompts of 800 tokens on average, as spread as that; answers of 50 to 200",
    ),
    (
        "hadal bench --trace mooncake.jsonl.gz --speed 0.1 --duration 300",
        "the first of a trace's requests at a tenth of their speed, with the text that they share",
    ),
    ("hadal bench --rate 2 --shared 400 --json | jq .levels", "for programs"),
    after=(
        "A rate is an open load: requests come at their times whether others are done or not, and"
        " wait from then on. A concurrency is a closed one: each is sent when another is done."
        " TTFT is the time to the first text, TPOT the mean time of a token after it, ITL the time"
        " between two pieces of text, E2E until the end; goodput counts what kept every promise of"
        " --slo. Ctrl-C shows what was measured so far. Ends with 0, 1 if no request was answered,"
        " 2 if it could not begin, 130 if it was stopped."
    ),
)


def bench(
    url: Annotated[
        str,
        typer.Argument(help="Where the server is, with or without /v1.", callback=server_url),
    ] = URL,
    rate: Annotated[
        str, typer.Option(help="Requests per second, one level each, such as 0.5,1,2.")
    ] = "",
    concurrency: Annotated[
        str,
        typer.Option(help="Requests at once, one level each. [dim]1,4,16 without --rate[/dim]"),
    ] = "",
    duration: Annotated[
        float, typer.Option(help="Seconds in which a level sends.", min=0.5, max=86_400)
    ] = 30.0,
    requests: Annotated[
        int | None, typer.Option(help="Most requests of a level. [dim]no limit[/dim]", min=1)
    ] = None,
    tokens_in: Annotated[
        str,
        typer.Option(
            "--input",
            help=(
                "Tokens of a prompt: 200, 100-400, normal:MEAN:SPREAD, lognormal:MEAN:VARIATION or"
                " exponential:MEAN."
            ),
        ),
    ] = "200",
    tokens_out: Annotated[
        str, typer.Option("--output", help="Tokens of an answer, in the same way.")
    ] = "100",
    shared: Annotated[
        int, typer.Option(help="Tokens with which all prompts begin, for the cache.", min=0)
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Lengths, and without --rate and --concurrency times, from Mooncake's .jsonl[.gz] or"
                " Azure's .csv."
            )
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="Of a trace's times: 2 is twice as fast.", min=1e-4, max=1e4)
    ] = 1.0,
    scale: Annotated[
        float, typer.Option(help="What a trace's lengths are multiplied by.", min=1e-4, max=1e3)
    ] = 1.0,
    slo: Annotated[
        str,
        typer.Option(help="Promises such as ttft=2s,tpot=50ms; itl and e2e can be promised, too."),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Name of the model. [dim]the first the server lists[/dim]")
    ] = "",
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
    warm_up: Annotated[
        int, typer.Option(help="Requests before the first level that do not count.", min=0, max=256)
    ] = 4,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take.", min=0.1, max=86_400)
    ] = 120.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed makes the same requests, which a cache may know. [dim]chance[/dim]",
            min=0,
            max=2**63 - 1,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.json and bench.html. [dim]none[/dim]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bench.json.")] = False,
) -> None:
    """Load a server that speaks OpenAI's API, Hadal's or another, and measure latency, throughput and
    goodput.
    """
    from hadal.apps.bench.lengths import parse_lengths, read_trace
    from hadal.apps.bench.load import LoadPlan
    from hadal.apps.bench.request import Target
    from hadal.apps.bench.run import BenchOptions, run
    from hadal.apps.bench.texts import Texts
    from hadal.apps.bench.values import parse_promises

    if endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint is {endpoint!r}; chat or completions is needed.")
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
    """Return the levels of load. `speed`: of a trace; None without one. Raises ConfigError."""
    from hadal.apps.bench.load import Level

    if not rate and not concurrency:
        if speed is not None:
            return [Level("trace", speed)]
        concurrency = "1,4,16"
    levels = [Level("rate", value) for value in _numbers(rate, "--rate", 1e-3, 1e5)]
    for value in _numbers(concurrency, "--concurrency", 1, 4096):
        if value != int(value):
            raise ConfigError(f"--concurrency is {value:g}; whole numbers are needed.")
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
            f"{option}: {json.dumps(bad[0])} is no number from {low:g} to {high:g}; write such as"
            " 1,2,4."
        )
    return values

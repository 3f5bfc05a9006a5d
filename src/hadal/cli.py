"""`hadal`: the commands. Each loads what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Annotated, Any

import typer

from hadal import __version__
from hadal.commands.plan import EPILOG as PLAN_EPILOG
from hadal.commands.plan import plan as plan_deployment
from hadal.commands.replay import EPILOG as REPLAY_EPILOG
from hadal.commands.replay import replay
from hadal.commands.simulate import EPILOG as SIMULATE_EPILOG
from hadal.commands.simulate import simulate as simulate_day
from hadal.commands.step import EPILOG as STEP_EPILOG
from hadal.commands.step import step
from hadal.core.config import Deployment, read_deployment
from hadal.core.errors import ConfigError

EXIT_CONFIG = 2
URL = "http://127.0.0.1:8000"

app = typer.Typer(
    help="DeepSeek-V3/R1's inference system, whole, in Python. Start with `hadal serve`, then `hadal chat`.",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hadal {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Shared options."""


@app.command(
    epilog=(
        "[bold]Examples[/bold]\n\n"
        "hadal serve                                     the model that ships with Hadal, on port 8000\n\n"
        "hadal serve --model ~/models/my-v3 --port 9000  any DeepSeek-V3 checkpoint in a Hugging Face folder\n\n"
        "hadal serve --config configs/laptop.toml        everything that can be set, with what it means\n\n"
        "hadal serve --config FILE --dry-run             what would run where, in how much memory; starts nothing\n\n"
        "hadal serve --cache-folder ~/kv --cache-mb 20000   keep KV on disk, over restarts\n\n"
        "HADAL_API_KEYS=one,two hadal serve --host 0.0.0.0   for others, who must send one of the keys\n\n"
        "Ctrl-C lets running streams finish; a second one ends them."
    )
)
def serve(
    model: Annotated[str | None, typer.Option(help="Hugging Face folder of the model. Or HADAL_MODEL.")] = None,
    config: Annotated[Path | None, typer.Option(help="Deployment file (TOML); options here override it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address; 0.0.0.0 for all of them. [dim]127.0.0.1[/dim]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [dim]8000[/dim]")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name in the API. [dim]the folder's[/dim]")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that is let in; may be given again. Or HADAL_API_KEYS=a,b.")
    ] = None,
    cache_folder: Annotated[
        str | None, typer.Option(help="Folder for KV on disk; '' for none. [dim]none[/dim]")
    ] = None,
    cache_mb: Annotated[int | None, typer.Option(help="Most that is kept there. [dim]4096[/dim]", min=1)] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_dir: Annotated[Path | None, typer.Option(help="Folder for a log file per process, instead of stderr.")] = None,
    run_folder: Annotated[
        Path | None, typer.Option(help="Folder for sockets and status.json. [dim]a temporary one[/dim]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No banner, warnings only.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print topology, memory and expert map; start nothing. No weights needed.")
    ] = False,
) -> None:
    """Serve a model over the OpenAI API: a gateway, prefill units and decode units, each of one process or of many."""
    overrides = {"model": model, "host": host, "port": port, "model_name": model_name}
    cache = {"folder": cache_folder, "disk_mb": cache_mb}
    if dry_run:
        sys.exit(_dry_run(config, overrides, cache))
    from hadal.runtime.banner import Banner
    from hadal.runtime.launch import Options
    from hadal.runtime.launch import serve as run
    from hadal.runtime.resolve import resolve

    level = "warning" if quiet and log_level == "info" else log_level
    try:
        if not isinstance(logging.getLevelNamesMapping().get(level.upper()), int):
            raise ConfigError(f"--log-level is {log_level!r}; debug, info, warning or error are known.")
        logging.basicConfig(
            level=level.upper(), datefmt="%H:%M:%S",
            format="supervisor | %(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        resolved = resolve(_deployment(config, overrides, cache))
        keys = _api_keys(api_key or [])
        options = Options(run_folder, log_dir, level, keys)
        banner = Banner(resolved, needs_key=bool(keys))
        code = run(resolved, options, (lambda status: None) if quiet else banner)
    except ConfigError as error:
        typer.echo(f"hadal serve: {error}", err=True)
        code = EXIT_CONFIG
    sys.exit(code)


@app.command(
    epilog=(
        "[bold]Examples[/bold]\n\n"
        "hadal chat                                 with the server on this machine\n\n"
        "hadal chat --url http://other:8000         with another one\n\n"
        "echo 'What is 12 + 30?' | hadal chat       one question, then leave"
    )
)
def chat(
    url: Annotated[str, typer.Option(help="Where the server is, with or without /v1.")] = URL,
    model: Annotated[str, typer.Option(help="Name of the model. [dim]the first the server lists[/dim]")] = "",
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [dim]the model's own[/dim]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, thinking included.")] = None,
) -> None:
    """Chat in the terminal with a running server: thinking dimmed, tokens per second after each answer."""
    from hadal.gateway.terminal_chat import chat as talk

    sys.exit(
        talk(url, model=model, api_key=api_key, system=system, temperature=temperature, max_tokens=max_tokens)
    )


@app.command(name="eval")
def evaluate(
    url: Annotated[str, typer.Option(help="Where the server is.")] = URL,
    num_per_task: Annotated[int, typer.Option(help="Prompts per task.", min=1)] = 30,
    task: Annotated[list[str] | None, typer.Option(help="Only this task; may be given again.")] = None,
    seed: Annotated[int, typer.Option(help="Which held-out prompts are drawn.")] = 0,
    model: Annotated[str, typer.Option(help="Name of the model. [dim]the first the server lists[/dim]")] = "",
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
    concurrency: Annotated[int, typer.Option(help="Prompts asked at once.", min=1)] = 16,
    show_wrong: Annotated[int, typer.Option(help="Wrong answers to show.", min=0)] = 3,
    at_least: Annotated[float, typer.Option(help="Leave with 1 if fewer are exact.", min=0, max=1)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Ask a running server held-out prompts of the tasks hadal-tiny was taught; print how many answers are exact."""
    from httpx import HTTPError

    from hadal.evals.run import run

    try:
        exact = run(
            url.rstrip("/").removesuffix("/v1"), num_per_task=num_per_task, seed=seed, tasks=tuple(task or ()),
            model=model, api_key=api_key, concurrency=concurrency, as_json=as_json, show_wrong=show_wrong,
        )  # fmt: skip
    except (ValueError, HTTPError) as error:
        hint = "Is there a server? Start one with `hadal serve`." if isinstance(error, HTTPError) else ""
        typer.echo(f"hadal eval: {url}: {error}. {hint}" if hint else f"hadal eval: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    sys.exit(0 if exact >= at_least else 1)


@app.command(
    epilog=(
        "[bold]Examples[/bold]\n\n"
        "hadal report                               the last 24 hours, hour by hour\n\n"
        "hadal report --last 7d --by tenant         who asked for how much in a week\n\n"
        "hadal report --prices 0.07/0.27/1.10       the same requests at other prices\n\n"
        "hadal report --ledger postgresql://USER@HOST/NAME --json"
    )
)
def report(
    last: Annotated[str, typer.Option(help="How far back: 90m, 24h, 7d, 2w.")] = "24h",
    by: Annotated[str, typer.Option(help="hour, model or tenant.")] = "hour",
    ledger: Annotated[str, typer.Option(help="Path or URL. [dim]HADAL_LEDGER, else the user's[/dim]")] = "auto",
    prices: Annotated[
        str, typer.Option(help="Other prices than were charged: a list's name, or dollars per million, HIT/MISS/OUT.")
    ] = "",
    utc: Annotated[bool, typer.Option("--utc", help="Hours of UTC instead of this machine's.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """What was served and what it earned: nodes, tokens, cache hits, throughput, cost, income, out of the ledger."""
    from hadal.commands.report import run

    sys.exit(run(last=last, by=by, as_json=as_json, ledger=ledger, prices=prices, is_utc=utc, echo=typer.echo))


@app.command(
    epilog=(
        "[bold]Examples[/bold]\n\n"
        "hadal trace                                the next 3 steps of decode-0, into trace.json\n\n"
        "hadal trace --unit prefill-0 --steps 1     one step of a prefill unit\n\n"
        "Open the file at ui.perfetto.dev. The unit must be at work: send it requests meanwhile."
    )
)
def trace(
    url: Annotated[str, typer.Option(help="Where the server is.")] = URL,
    unit: Annotated[str, typer.Option(help="Which unit.")] = "decode-0",
    steps: Annotated[int, typer.Option(help="How many steps.", min=1, max=100)] = 3,
    output: Annotated[Path, typer.Option(help="File for Perfetto or chrome://tracing.")] = Path("trace.json"),
    wait: Annotated[float, typer.Option(help="Seconds to wait for the steps.", min=0, max=300)] = 30.0,
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
) -> None:
    """Trace live steps of a running server's unit: what was computed, what travelled, how much of that was hidden."""
    from hadal.gateway.trace import TraceError, describe, fetch, write

    try:
        reply = fetch(url, unit, steps, wait_s=wait, api_key=api_key)
        write(reply, output)
    except TraceError as error:
        typer.echo(f"hadal trace: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    typer.echo(describe(reply))
    typer.echo(f"Written to {output}; open it at ui.perfetto.dev.")


@app.command(
    epilog=(
        "[bold]Examples[/bold]\n\n"
        "echo '{\"tokens_per_expert\": [[90, 20, 10, 40]]}' > loads.json\n\n"
        "hadal balance --loads loads.json --ranks 2 --slots 3\n\n"
        "  one layer of 4 experts on 2 ranks of 3 slots: the busy experts get the 2 spare slots\n\n"
        "hadal balance --loads v3.json.gz --ranks 32 --nodes 4 --slots 9 --mode hybrid\n\n"
        "  DeepSeek-V3's prefill unit: groups stay on a node as far as 98 % balance allows\n\n"
        "hadal balance --loads v3.json.gz --ranks 144 --slots 2 --json > placement.json\n\n"
        "hadal balance --loads new.json --ranks 144 --slots 2 --current placement.json --max-moves 500\n\n"
        "  other loads since: the best placement that moves at most 500 replicas\n\n"
        "Loads are tokens, a row per layer, a number per expert. A list of such matrices is a window of steps, each of "
        "which lasts as long as its busiest rank."
    )
)
def balance(
    loads: Annotated[
        Path, typer.Option(help="JSON or .gz: tokens, layers by experts, or an object with tokens_per_expert.")
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of the unit.", min=1)],
    slots: Annotated[
        int, typer.Option(help="Slots of each rank; as many as experts or more: of all ranks together.", min=1)
    ],
    nodes: Annotated[int, typer.Option(help="Nodes that the ranks are on.", min=1)] = 1,
    mode: Annotated[str, typer.Option(help="global, hierarchical (groups on one node), hybrid or fast.")] = "global",
    groups: Annotated[
        int, typer.Option(help="The gate's groups of experts, for modes with nodes (8 in DeepSeek-V3).", min=1)
    ] = 8,
    target: Annotated[
        float, typer.Option(help="Balancedness that hybrid and --max-moves ask of every layer.", min=0.01, max=1)
    ] = 0.98,
    current: Annotated[Path | None, typer.Option(help="Today's placement, as --json prints it.")] = None,
    max_moves: Annotated[
        int | None,
        typer.Option(help="Stay near today's placement: at most so many replicas move, and those it lacks.", min=0),
    ] = None,
    weighted: Annotated[bool, typer.Option("--weighted", help="Split experts unevenly over their replicas.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Place experts on ranks for measured loads; print the plan, or how balanced it is beside today's."""
    from hadal.policy import expert_report as report
    from hadal.policy.expert_balance import balance as plan_experts

    try:
        window = report.loads_of(_read_json(loads))
        cluster = report.cluster_of(window, ranks, nodes, slots)
        before = split = None
        if current is not None:
            today = _read_json(current)
            before = report.placement_of(today, window, cluster)
            split = report.split_of(today, before)
        start = time.perf_counter()
        plan = plan_experts(
            window, cluster, mode=mode, num_groups=groups, target=target, current=before, max_moves=max_moves,
            weighted=weighted,
        )  # fmt: skip
        elapsed_ms = 1e3 * (time.perf_counter() - start)
    except ValueError as error:
        typer.echo(f"hadal balance: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    if as_json:
        typer.echo(json.dumps(report.as_json(plan, window, elapsed_ms)))
    else:
        typer.echo(report.bars(plan, window, cluster, before, elapsed_ms, split))


app.command(epilog=STEP_EPILOG)(step)
app.command(name="simulate", epilog=SIMULATE_EPILOG)(simulate_day)
app.command(epilog=REPLAY_EPILOG)(replay)
app.command(name="plan", epilog=PLAN_EPILOG)(plan_deployment)


def _read_json(path: Path) -> Any:
    """A file's JSON value, gzipped or not. Raises ValueError that says what is wrong with the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else (error.strerror or "").lower()
        raise ValueError(f"{path} cannot be read: {why}.") from error
    try:
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is gzipped, but damaged or cut short; copy it again.") from error
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path} nests deeper than any matrix.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, gzipped or plain: {error}.") from error


def _dry_run(config: Path | None, overrides: dict[str, Any], cache: dict[str, Any]) -> int:
    """0: the plan is sound, wherever it can run. EXIT_CONFIG: it can run nowhere."""
    from hadal.runtime.dry_run import print_plan
    from hadal.runtime.resolve import plan, why_not_run

    try:
        resolved = plan(_deployment(config, overrides, cache))
    except ConfigError as error:
        typer.echo(f"hadal serve: {error}", err=True)
        return EXIT_CONFIG
    print_plan(resolved, why_not_run(resolved))
    return 0


def _deployment(config: Path | None, overrides: dict[str, Any], cache: dict[str, Any] | None = None) -> Deployment:
    """`overrides` of the file's fields, `cache` of those in its table; None leaves a field as it is."""
    deployment = Deployment(**_given(overrides)) if config is None else read_deployment(config, **overrides)
    return dataclasses.replace(deployment, cache=dataclasses.replace(deployment.cache, **_given(cache or {})))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _api_keys(given: list[str]) -> tuple[str, ...]:
    if any(not key.strip() for key in given):
        raise ConfigError("--api-key is empty; give a key, or leave the option out to serve without keys.")
    keys = [*given, *os.environ.get("HADAL_API_KEYS", "").split(",")]
    if any("," in key for key in given):
        raise ConfigError("--api-key: a key cannot hold a comma.")
    return tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))


if __name__ == "__main__":
    app()

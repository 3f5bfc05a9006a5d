"""`hadal`: the commands. Each loads what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]  # Not in __all__.

from hadal import __version__
from hadal.commands.address import URL, server_url, server_url_or_none
from hadal.commands.bench import EPILOG as BENCH_EPILOG
from hadal.commands.bench import bench
from hadal.commands.errors import Commands
from hadal.commands.examples import examples
from hadal.commands.keys import FILE_VARIABLE
from hadal.commands.keys import app as keys_app
from hadal.commands.model import EPILOG as MODEL_EPILOG
from hadal.commands.model import model
from hadal.commands.replay import EPILOG as REPLAY_EPILOG
from hadal.commands.replay import replay
from hadal.commands.step import EPILOG as STEP_EPILOG
from hadal.commands.step import step
from hadal.core.balance import OFF
from hadal.core.config import Deployment, read_deployment
from hadal.core.errors import EXIT_CONFIG, ConfigError

PLAN_SLO = "ttft=2s,tpot=50ms"
SIMULATE_PRESET = "deepseek-day"
COMPLETE_VARIABLE = "_HADAL_COMPLETE"
"""Set by a shell that asks how a line goes on; Typer answers."""

_Tables = dict[str, dict[str, Any]]

# Typer's own options for it would stand in every help; `hadal completion` prints the same.
completion_init()
app = typer.Typer(
    cls=Commands,
    help=(
        "DeepSeek-V3/R1's inference system, whole, in Python. Start with `hadal serve`, then `hadal"
        " chat`."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Shell(StrEnum):
    """A shell for which `hadal completion` has a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hadal {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Shared options."""


@app.command(
    epilog=examples(
        ("hadal serve", "the model that ships with Hadal, on port 8000"),
        (
            "hadal serve --model ~/models/my-v3 --port 9000",
            "any DeepSeek-V3 checkpoint in a Hugging Face folder",
        ),
        (
            "hadal serve --config configs/laptop.toml",
            "everything that can be set, with what it means",
        ),
        (
            "hadal serve --config FILE --dry-run",
            "what would run where, in how much memory; starts nothing",
        ),
        ("hadal serve --cache-folder ~/kv --cache-mb 20000", "keep KV on disk, over restarts"),
        ("hadal serve --drafts auto", "check drafts of the model's MTP module where that pays"),
        ("hadal serve --gateways 2", "two processes take requests, on one port"),
        (
            "hadal serve --host 0.0.0.0 --api-keys-file keys.txt",
            "for others, who must send one of the keys",
        ),
        after="Ctrl-C lets running streams finish; a second one ends them.",
    )
)
def serve(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face folder of the model. Or HADAL_MODEL.")
    ] = None,
    accept_config: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Key of the model's JSON files to pass over although Hadal does not know it, as a"
                " refusal names it: rope_parameters.KEY. May be given more than once."
            ),
            metavar="KEY",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Deployment file (TOML), or one that ships: laptop_ep. Options override it."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address; 0.0.0.0 for all of them. [dim]127.0.0.1[/dim]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 takes a free one. [dim]8000[/dim]")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name in the API. [dim]the folder's[/dim]")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that is let in, for a trial: all users of this machine see it in `ps`."
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            envvar=FILE_VARIABLE,
            show_envvar=False,
            help=(
                "File with the keys that are let in, one a line, yours alone (chmod 600); followed"
                " while it runs. `hadal keys` writes one. Behind a key its rights: "
                "'priority' (to go ahead of others), 'operator' (/audit, /trace)."
            ),
        ),
    ] = None,
    open_to_network: Annotated[
        bool,
        typer.Option(
            "--open-to-network",
            help=(
                "Serve a network without keys: who reaches the address may ask the model, read files"
                " and batches, and operate the server."
            ),
        ),
    ] = False,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with what processes prove themselves by (chmod 600). [dim]drawn at"
                " start[/dim]"
            )
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help=(
                "Where units run: local, this host; ray, or ray:ADDRESS, the nodes of a Ray cluster"
                " that this host is one of. [dim]local[/dim]"
            )
        ),
    ] = None,
    gateways: Annotated[
        int | None,
        typer.Option(help="Processes that take requests, on one port. [dim]1[/dim]", min=1, max=64),
    ] = None,
    console_port: Annotated[
        int | None,
        typer.Option(help="Port of the pages, chat and console. [dim]8001[/dim]", min=0, max=65535),
    ] = None,
    no_console: Annotated[bool, typer.Option("--no-console", help="No pages.")] = False,
    drafts: Annotated[
        str | None,
        typer.Option(
            help=(
                "Tokens that the model's MTP module drafts a pass: 0 to 3, or auto, up to 2, as many"
                " as pay."
                " No draft changes a token. [dim]0[/dim]"
            )
        ),
    ] = None,
    cache_folder: Annotated[
        str | None, typer.Option(help="Folder for KV on disk; '' for none. [dim]none[/dim]")
    ] = None,
    cache_mb: Annotated[
        int | None, typer.Option(help="Most that is kept there. [dim]4096[/dim]", min=1)
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[
        str, typer.Option(help="text, or json: an object a line, for programs.")
    ] = "text",
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for a log file per process, instead of stderr.")
    ] = None,
    run_folder: Annotated[
        Path | None,
        typer.Option(help="Folder for sockets and status.json. [dim]a temporary one[/dim]"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No banner, warnings only.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print topology, memory and expert map; start nothing. No weights needed.",
        ),
    ] = False,
) -> None:
    """Serve a model over the OpenAI API: a gateway, prefill units and decode units, each of one
    process or of many.
    """
    if drafts is not None and drafts not in ("auto", "0", "1", "2", "3"):
        raise typer.BadParameter("0, 1, 2, 3 or auto", param_hint="--drafts")
    engine, _, address = (on or "").partition(":")
    if on is not None and (engine not in ("local", "ray") or (address and engine == "local")):
        raise typer.BadParameter("local, ray or ray:ADDRESS", param_hint="--on")
    overrides = {
        "model": model,
        "host": host,
        "port": port,
        "model_name": model_name,
        "accept_config": tuple(accept_config) if accept_config else None,
    }
    tables: _Tables = {
        "cache": {"folder": cache_folder, "disk_mb": cache_mb},
        "gateway": {"processes": gateways},
        "console": {"mode": OFF if no_console else None, "port": console_port},
        "cluster": {"on": engine or None, "address": address or None},
        "decode": {"drafts": int(drafts) if drafts and drafts.isdecimal() else drafts},
    }
    given = api_key or [], api_keys_file, open_to_network
    if dry_run:
        sys.exit(_dry_run(config, overrides, tables, (log_level, log_format), given))
    from hadal.runtime.process.forks import Forks, environment

    forks = Forks(environment())  # It takes longest: everything else happens meanwhile.
    from hadal.core.handshake import is_near
    from hadal.runtime.banner import OPEN_TO_ALL, Banner, log_status
    from hadal.runtime.launch import serve as run
    from hadal.runtime.process.logs import JSON, TEXT, start_log
    from hadal.runtime.resolve import resolve, unknown_keys_warnings
    from hadal.runtime.supervisor.options import Options

    level = "warning" if quiet and log_level == "info" else log_level
    try:
        start_log("supervisor", level, log_format)
        resolved = resolve(_deployment(config, overrides, tables))
        keys = _keys_for(resolved.deployment, *given)
        has_bar = sys.stderr.isatty() and log_format == TEXT and not quiet
        options = Options(
            run_folder,
            log_dir,
            level,
            log_format,
            _api_keys(api_key or []),
            has_bar,
            secret_file,
            api_keys_file.absolute() if api_keys_file is not None else None,
        )
        if (quiet or log_format == JSON) and not keys and not is_near(resolved.deployment.host):
            logging.getLogger("hadal").warning("%s", OPEN_TO_ALL)
        if quiet or log_format == JSON:  # Else the banner says it.
            for sentence in unknown_keys_warnings(resolved.deployment):
                logging.getLogger("hadal").warning("%s", sentence)
        announce = log_status if log_format == JSON else Banner(resolved, needs_key=bool(keys))
        code = run(resolved, options, (lambda status: None) if quiet else announce, forks)
    except ConfigError as error:
        if log_format == JSON:
            logging.getLogger("hadal").critical("%s", error)
        else:
            typer.echo(f"hadal serve: {error}", err=True)
        code = EXIT_CONFIG
    finally:
        forks.close()
    sys.exit(code)


@app.command(
    epilog=examples(
        ("hadal chat", "with the server on this machine"),
        ("hadal chat --url http://other:8000", "with another one"),
        ("echo 'What is 12 + 30?' | hadal chat", "one question, then leave"),
    )
)
def chat(
    url: Annotated[
        str, typer.Option(help="Where the server is, with or without /v1.", callback=server_url)
    ] = URL,
    model: Annotated[
        str, typer.Option(help="Name of the model. [dim]the first the server lists[/dim]")
    ] = "",
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. [dim]the model's own[/dim]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, thinking included.")
    ] = None,
) -> None:
    """Chat in the terminal with a running server: thinking behind a bar, tokens per second after
    each answer.
    """
    from hadal.apps.terminal.chat import chat as talk

    sys.exit(
        talk(
            url,
            model=model,
            api_key=api_key,
            system=system,
            temperature=temperature,
            max_tokens=max_tokens,
        )
    )


@app.command(
    epilog=examples(
        ("hadal report", "the last 24 hours, hour by hour"),
        ("hadal report --last 7d --by tenant", "who asked for how much in a week"),
        ("hadal report --tenant", "and whose the GPUs' time was, used and idle"),
        ("hadal report --prices 0.07/0.27/1.10", "the same requests at other prices"),
        (
            "hadal report --ledger postgresql://USER@HOST/NAME --json",
            "another ledger, for programs",
        ),
    )
)
def report(
    last: Annotated[str, typer.Option(help="How far back: 90m, 24h, 7d, 2w.")] = "24h",
    by: Annotated[str, typer.Option(help="hour, model or tenant.")] = "hour",
    tenant: Annotated[
        bool,
        typer.Option("--tenant", help="By tenant, with the GPU time that each used and left idle."),
    ] = False,
    ledger: Annotated[
        str, typer.Option(help="Path or URL. [dim]HADAL_LEDGER, else the user's[/dim]")
    ] = "auto",
    prices: Annotated[
        str,
        typer.Option(
            help=(
                "Other prices than were charged: a list's name, or dollars per million,"
                " HIT/MISS/OUT."
            )
        ),
    ] = "",
    utc: Annotated[
        bool, typer.Option("--utc", help="Hours of UTC instead of this machine's.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """What was served and what it earned: nodes, tokens, cache hits, throughput, cost, income, out
    of the ledger.
    """
    from hadal.commands.report import run

    run(
        last=last,
        by=by,
        as_json=as_json,
        ledger=ledger,
        prices=prices,
        is_utc=utc,
        has_uses=tenant,
    )


@app.command(
    epilog=examples(
        ("hadal trace", "the next 3 steps of decode-0, into trace.json"),
        ("hadal trace --unit prefill-0 --steps 1", "one step of a prefill unit"),
        after=(
            "Open the file at ui.perfetto.dev. The unit must be at work: send it requests"
            " meanwhile."
        ),
    )
)
def trace(
    url: Annotated[str, typer.Option(help="Where the server is.", callback=server_url)] = URL,
    unit: Annotated[str, typer.Option(help="Which unit.")] = "decode-0",
    steps: Annotated[int, typer.Option(help="How many steps.", min=1, max=100)] = 3,
    output: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File for Perfetto or chrome://tracing. [dim]trace.json, or a free name like"
                " it[/dim]"
            )
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the steps.", min=0, max=300)
    ] = 30.0,
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
) -> None:
    """Trace live steps of a running server's unit: what was computed, what travelled, how much of
    that was hidden.
    """
    from hadal.gateway.desk.trace import describe, fetch, write
    from hadal.progress import Bar

    with Bar("hadal trace") as bar:
        bar.update(f"waiting for {steps} steps of {unit}, which come with requests")
        reply = fetch(url, unit, steps, wait_s=wait, api_key=api_key)
    written = write(reply, output)
    typer.echo(describe(reply, shutil.get_terminal_size().columns))
    typer.echo(f"Written to {written}; open it at ui.perfetto.dev.")


_RUN_FOLDER = typer.Option(
    help="Of the server. [dim]the one that runs here with a folder of its own[/dim]"
)


@app.command(
    epilog=examples(
        ("hadal status", "units, ranks and gateways of the server on this host"),
        ("hadal status --json | jq .wrong", "what is wrong with it, for programs"),
        after="Ends with 0 if all is there, 1 if something is missing, 2 if no server runs.",
    )
)
def status(
    run_folder: Annotated[Path | None, _RUN_FOLDER] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Say what runs on this host: units and where they lie, who is ready, what was started again
    and why, what is wrong.
    """
    from hadal.commands.status import find, print_status

    found = find(run_folder)
    sys.exit(print_status(found, as_json=as_json))


@app.command(
    epilog=examples(
        ("hadal rollout", "start all units anew, one by one, with the code that is installed now"),
        ("hadal rollout --model FOLDER", "go over to other weights of the same model"),
        after=(
            "No request fails: what a unit holds is finished, or goes on elsewhere, before it ends."
            " Ends with 0 if all are replaced, 1 if a new one does not come up, 2 if it cannot be."
        ),
    )
)
def rollout(
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint's folder, on every host. [dim]the one that is served now[/dim]"
        ),
    ] = "",
    is_waited: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until all units are replaced.")
    ] = True,
    run_folder: Annotated[Path | None, _RUN_FOLDER] = None,
) -> None:
    """Replace the units of a running server, one after the other, while it serves."""
    from hadal.commands.rollout import roll_out

    try:
        sys.exit(roll_out(run_folder, model, is_waited=is_waited))
    except KeyboardInterrupt:
        typer.echo("hadal rollout: it goes on; `hadal status` says how far it is.", err=True)
        sys.exit(130)


@app.command(
    epilog=examples(
        ("hadal logs", "the last lines of all processes, in order"),
        ("hadal logs decode-0 -n 200", "of a unit: its leader and its ranks"),
        ("hadal logs decode-0.3 -f", "of one rank, and go on with what it writes"),
        after=(
            "A megabyte or two of each process is kept in the run folder, beside what --log-dir or"
            " the terminal gets; it goes when the server ends."
        ),
    )
)
def logs(
    name: Annotated[
        str | None,
        typer.Argument(help="A unit, a process or supervisor. [dim]all of them[/dim]"),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many.", min=0)] = 50,
    is_followed: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")
    ] = False,
    run_folder: Annotated[Path | None, _RUN_FOLDER] = None,
) -> None:
    """Print what a running server's processes wrote last."""
    from hadal.commands.logs import print_logs
    from hadal.commands.status import find

    try:
        print_logs(find(run_folder), name, lines, is_followed=is_followed)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)


@app.command(
    epilog=examples(
        (
            (
                "echo '{\"tokens_per_expert\": [[90, 20, 10, 40]]}' > loads.json\n"
                "hadal balance --loads loads.json --ranks 2 --expert-slots 3"
            ),
            "one layer of 4 experts on 2 ranks of 3 slots each: the busy experts get the 2 spare slots",
        ),
        (
            (
                "hadal balance --loads v3.json.gz --ranks 32 --nodes 4 \\\n"
                "    --expert-slots 9 --mode hybrid"
            ),
            "DeepSeek-V3's prefill unit: groups stay on a node as far as 98 % balance allows",
        ),
        (
            (
                "hadal balance --loads v3.json.gz --ranks 144 --expert-slots 2 \\\n"
                "    --json > placement.json\n"
                "hadal balance --loads new.json --ranks 144 --expert-slots 2 \\\n"
                "    --current placement.json --max-moves 500"
            ),
            "other loads since: the best placement that moves at most 500 replicas",
        ),
        after=(
            "Loads are tokens, a row per layer, a number per expert. A list of such matrices is a"
            " window of steps, each of which lasts as long as its busiest rank."
        ),
    )
)
def balance(
    loads: Annotated[
        Path,
        typer.Option(
            help="JSON or .gz: tokens, layers by experts, or an object with tokens_per_expert."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of the unit.", min=1, max=4096)],
    expert_slots: Annotated[
        int,
        typer.Option(
            help="Expert slots of each rank; as many as experts or more: of all ranks together.",
            min=1,
            max=65_536,
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Nodes that the ranks are on.", min=1, max=4096)] = 1,
    mode: Annotated[
        str, typer.Option(help="global, hierarchical (groups on one node), hybrid or fast.")
    ] = "global",
    groups: Annotated[
        int,
        typer.Option(
            help="The gate's groups of experts, for modes with nodes (8 in DeepSeek-V3).", min=1
        ),
    ] = 8,
    target: Annotated[
        float,
        typer.Option(
            help="Balancedness that hybrid and --max-moves ask of every layer.", min=0.01, max=1
        ),
    ] = 0.98,
    current: Annotated[
        Path | None, typer.Option(help="Today's placement, as --json prints it.")
    ] = None,
    max_moves: Annotated[
        int | None,
        typer.Option(
            help="Stay near today's placement: at most so many replicas move, and those it lacks.",
            min=0,
        ),
    ] = None,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Split experts unevenly over their replicas.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Place experts on ranks for measured loads; print the plan, or how balanced it is beside
    today's.
    """
    from hadal.commands.balance import plan_text

    text = plan_text(
        loads,
        current,
        ranks,
        nodes,
        expert_slots,
        is_json=as_json,
        mode=mode,
        num_groups=groups,
        target=target,
        max_moves=max_moves,
        weighted=weighted,
    )
    typer.echo(text)


@app.command(
    epilog=examples(
        (
            "hadal completion bash >> ~/.bashrc",
            "Tab completes commands and options in shells that start from now on",
        ),
        ("hadal completion zsh >> ~/.zshrc", "the same in zsh; its lines belong after compinit"),
        ("hadal completion fish > ~/.config/fish/completions/hadal.fish", "and in fish"),
    )
)
def completion(shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> None:
    """Print what makes a shell complete hadal's commands and options."""
    typer.echo(
        get_completion_script(prog_name="hadal", complete_var=COMPLETE_VARIABLE, shell=shell.value)
    )


app.command(epilog=BENCH_EPILOG)(bench)
app.command(epilog=MODEL_EPILOG)(model)
app.add_typer(keys_app, name="keys")


app.command(epilog=STEP_EPILOG)(step)


@app.command(
    epilog=examples(
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


app.command(epilog=REPLAY_EPILOG)(replay)


@app.command(
    epilog=examples(
        ("hadal console", "the pages of a server that runs here without any: --no-console"),
        (
            "hadal simulate --frames peak.gz; hadal console --frames peak.gz",
            "278 simulated nodes at the published peak",
        ),
        after="`hadal serve` starts the pages by itself.",
    )
)
def console(
    frames: Annotated[
        Path | None, typer.Option(help="What `hadal simulate --frames` wrote, instead of a server.")
    ] = None,
    run_folder: Annotated[
        Path | None, typer.Option(help="Folder of a server. [dim]the one that runs here[/dim]")
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            help="A server elsewhere: the pages know of it what it says itself. [dim]none[/dim]",
            callback=server_url_or_none,
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="Address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8001,
    open_to_network: Annotated[
        bool,
        typer.Option(
            "--open-to-network",
            help="Serve a network: who reaches the address sees what the console shows.",
        ),
    ] = False,
) -> None:
    """Serve the pages: a chat with a running server, and its console."""
    from hadal.apps.console.process import serve_alone
    from hadal.commands.status import find
    from hadal.core.handshake import is_near

    if not is_near(host) and not open_to_network:
        raise ConfigError(
            f"--host is {host}, and the pages ask for no key: who reaches it would see what the"
            " console shows. --open-to-network serves them all the same."
        )
    is_here = frames is None and not url
    folder = find(run_folder).folder if is_here else None
    serve_alone(folder, frames, url, host, port, lambda pages: typer.echo(f"{pages}/console"))


@app.command(
    epilog=examples(
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


def _dry_run(
    config: Path | None,
    overrides: dict[str, Any],
    tables: _Tables,
    log: tuple[str, str],
    keys: tuple[list[str], Path | None, bool],
) -> int:
    """Print the plan. Return the exit code: 0, or EXIT_CONFIG if no machine can run it."""
    from hadal.commands.served import read_served_text
    from hadal.runtime.plan_rows import print_plan
    from hadal.runtime.process.logs import check_log
    from hadal.runtime.resolve import has_tokenizer, plan, why_not_run

    try:
        check_log(*log)
        resolved = plan(_deployment(config, overrides, tables))
        _keys_for(resolved.deployment, *keys)
        folder = Path(resolved.deployment.model)
        # A folder of a config.json alone can be planned, one of weights is to be served.
        if has_tokenizer(folder) or any(folder.glob("*.safetensors")):
            read_served_text(folder, resolved.deployment.accept_config)
    except ConfigError as error:
        typer.echo(f"hadal serve: {error}", err=True)
        return EXIT_CONFIG
    print_plan(resolved, why_not_run(resolved))
    return 0


def _deployment(
    config: Path | None, overrides: dict[str, Any], tables: _Tables | None = None
) -> Deployment:
    """`overrides` of the file's fields, `tables` of those in its tables; None leaves a field as it
    is.
    """
    from hadal.runtime.resolve import deployment_file

    if config is None:
        deployment = Deployment(**_given(overrides))
    else:
        deployment = read_deployment(deployment_file(config), **overrides)
    changed = {
        name: msgspec.structs.replace(getattr(deployment, name), **_given(fields))
        for name, fields in (tables or {}).items()
    }
    return msgspec.structs.replace(deployment, **changed)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _keys_for(
    deployment: Deployment, given: list[str], path: Path | None, is_open: bool
) -> tuple[str, ...]:
    """Return the accepted API keys. Raises ConfigError, also if a network would be served without keys;
    `is_open` allows that.
    """
    from hadal.core.handshake import is_near

    keys = _api_keys(given, path)
    if not keys and not is_open and not is_near(deployment.host):
        raise ConfigError(
            f"host is {deployment.host}, and there are no API keys: who reaches it could ask the model,"
            " read files and batches, and operate the server. Make keys with `hadal keys add NAME` and"
            " serve with --api-keys-file keys.txt; --open-to-network serves without."
        )
    return keys


def _api_keys(given: list[str], path: Path | None = None) -> tuple[str, ...]:
    from hadal.gateway.desk.keys import keys_of, read_lines

    if any(not key.strip() for key in given):
        raise ConfigError(
            "--api-key is empty; give a key, or leave the option out to serve without keys."
        )
    keys = [*given, *filter(str.strip, os.environ.get("HADAL_API_KEYS", "").split(","))]
    for key in keys:
        _check_key(key, "--api-key or HADAL_API_KEYS")
    if path is not None:
        in_file = read_lines(path)
        if not in_file:
            raise ConfigError(f"{path}: there is no key in it. Write one a line.")
        keys_of(keys, path, in_file)
        keys += in_file
    return tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))


def _check_key(line: str, where: str) -> None:
    from hadal.gateway.desk.auth import parse_key

    try:
        parse_key(line)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _unbroken(commands: typer.Typer) -> None:
    """Help is broken where a terminal ends, not where a line of a docstring does."""
    for command in commands.registered_commands:
        command.help = " ".join((command.callback.__doc__ or "").split())


for _commands in (app, keys_app):
    _unbroken(_commands)


if __name__ == "__main__":
    app()

"""Commands of `hadal`. Each imports its modules when it is called, so that `--help` is quick."""

from __future__ import annotations

import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]  # Not in __all__.

from hadal import __version__
from hadal.commands.address import URL, server_url
from hadal.commands.balance import EPILOG as BALANCE_EPILOG
from hadal.commands.balance import balance
from hadal.commands.bench import EPILOG as BENCH_EPILOG
from hadal.commands.bench import bench
from hadal.commands.console import EPILOG as CONSOLE_EPILOG
from hadal.commands.console import console
from hadal.commands.errors import Commands
from hadal.commands.examples import examples
from hadal.commands.keys import app as keys_app
from hadal.commands.model import EPILOG as MODEL_EPILOG
from hadal.commands.model import model
from hadal.commands.plan import EPILOG as PLAN_EPILOG
from hadal.commands.plan import plan
from hadal.commands.replay import EPILOG as REPLAY_EPILOG
from hadal.commands.replay import replay
from hadal.commands.serve import EPILOG as SERVE_EPILOG
from hadal.commands.serve import serve
from hadal.commands.simulate import EPILOG as SIMULATE_EPILOG
from hadal.commands.simulate import simulate
from hadal.commands.step import EPILOG as STEP_EPILOG
from hadal.commands.step import step

COMPLETE_VARIABLE = "_HADAL_COMPLETE"
"""Environment variable of a shell's completion request, which Typer answers."""


# Register the classes that answer shells' completion requests. Typer itself does so only with
# add_completion, which would also put its options into the help; `hadal completion` replaces those.
completion_init()
app = typer.Typer(
    cls=Commands,
    help=(
        "DeepSeek-V3/R1's complete inference system in Python. Start with `hadal serve`,"
        " then `hadal chat`."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Shell(StrEnum):
    """Shells for which `hadal completion` has a script."""

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
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Shared options."""


app.command(epilog=SERVE_EPILOG)(serve)


@app.command(
    epilog=examples(
        ("hadal chat", "chat with the server on this machine"),
        ("hadal chat --url http://other:8000", "chat with another server"),
        ("echo 'What is 12 + 30?' | hadal chat", "ask one question, then exit"),
    )
)
def chat(
    url: Annotated[
        str, typer.Option(help="URL of the server, with or without /v1.", callback=server_url)
    ] = URL,
    model: Annotated[
        str, typer.Option(help="Name of the model. [dim]the first one the server lists[/dim]")
    ] = "",
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature; 0 is greedy. [dim]the model's own[/dim]"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens of an answer, reasoning included.")
    ] = None,
) -> None:
    """Chat in the terminal with a running server: thinking is marked by a bar, tokens per second
    follow each answer.
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
        ("hadal report", "report the last 24 hours, hour by hour"),
        (
            "hadal report --last 7d --by tenant",
            "requests and tokens of each tenant in the last week",
        ),
        ("hadal report --tenant", "used and idle GPU time of each tenant"),
        ("hadal report --prices 0.07/0.27/1.10", "the same requests at other prices"),
        (
            "hadal report --ledger postgresql://USER@HOST/NAME --json",
            "another ledger, as JSON for programs",
        ),
    )
)
def report(
    last: Annotated[
        str, typer.Option(help="Period until now, such as 90m, 24h, 7d or 2w.")
    ] = "24h",
    by: Annotated[str, typer.Option(help="Rows of the report: hour, model or tenant.")] = "hour",
    tenant: Annotated[
        bool,
        typer.Option(
            "--tenant", help="Group by tenant and show each tenant's used and idle GPU time."
        ),
    ] = False,
    ledger: Annotated[
        str,
        typer.Option(help="Path or URL of the ledger. [dim]HADAL_LEDGER, else your own[/dim]"),
    ] = "auto",
    prices: Annotated[
        str,
        typer.Option(
            help=(
                "Prices to use instead of those charged: name of a price list, or dollars"
                " per million tokens as HIT/MISS/OUT."
            )
        ),
    ] = "",
    utc: Annotated[
        bool, typer.Option("--utc", help="Show hours in UTC instead of local time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Report requests served and money earned, from the ledger: nodes, tokens, cache hits,
    throughput, cost, income.
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
        ("hadal trace", "write the next 3 steps of decode-0 to trace.json"),
        ("hadal trace --unit prefill-0 --steps 1", "trace one step of a prefill unit"),
        after=(
            "Open the file at ui.perfetto.dev. Send requests while the command runs: a"
            " unit steps only while it has requests."
        ),
    )
)
def trace(
    url: Annotated[str, typer.Option(help="URL of the server.", callback=server_url)] = URL,
    unit: Annotated[str, typer.Option(help="Name of the unit.")] = "decode-0",
    steps: Annotated[int, typer.Option(help="Number of steps to trace.", min=1, max=100)] = 3,
    output: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Output file, for Perfetto or chrome://tracing. [dim]trace.json; if that"
                " exists, trace-2.json and so on[/dim]"
            )
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the steps.", min=0, max=300)
    ] = 30.0,
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
) -> None:
    """Trace live steps of a running server's unit: compute, transfers, and the share of transfers
    hidden behind compute.
    """
    from hadal.gateway.desk.trace import describe, fetch, write
    from hadal.progress import Bar

    with Bar("hadal trace") as bar:
        bar.update(f"waiting for {steps} steps of {unit} (a unit steps only while it has requests)")
        reply = fetch(url, unit, steps, wait_s=wait, api_key=api_key)
    written = write(reply, output)
    typer.echo(describe(reply, shutil.get_terminal_size().columns))
    typer.echo(f"Written to {written}; open it at ui.perfetto.dev.")


_RUN_FOLDER = typer.Option(
    help="Run folder of the server. [dim]that of the only server on this host[/dim]"
)


@app.command(
    epilog=examples(
        ("hadal status", "show units, ranks and gateways of the server on this host"),
        ("hadal status --json | jq .wrong", "current problems, for programs"),
        after="Exit code: 0 if everything is ready, 1 if something is missing, 2 if no server"
        " runs.",
    )
)
def status(
    run_folder: Annotated[Path | None, _RUN_FOLDER] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole status as JSON.")
    ] = False,
) -> None:
    """Show this host's units, their state, restarts with reasons, and current problems."""
    from hadal.commands.status import find, print_status

    found = find(run_folder)
    sys.exit(print_status(found, as_json=as_json))


@app.command(
    epilog=examples(
        ("hadal rollout", "restart all units, one by one, with the code that is installed now"),
        ("hadal rollout --model FOLDER", "switch to other weights of the same model"),
        after=(
            "No request fails: before a unit ends, its requests finish or continue on"
            " another unit. Exit code: 0 if all units are replaced, 1 if a new unit does"
            " not become ready, 2 if the rollout cannot begin."
        ),
    )
)
def rollout(
    model: Annotated[
        str,
        typer.Option(
            help="Folder of the checkpoint, with the same path on every host. [dim]the one"
            " served now[/dim]"
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
        typer.echo(
            "hadal rollout: the rollout continues; `hadal status` shows its progress.", err=True
        )
        sys.exit(130)


@app.command(
    epilog=examples(
        ("hadal logs", "print the last lines of all processes, ordered by time"),
        (
            "hadal logs decode-0 -n 200",
            "print the last 200 lines of a unit: its leader and its ranks",
        ),
        ("hadal logs decode-0.3 -f", "print lines of one rank, and follow new ones"),
        after=(
            "Besides --log-dir or the terminal, the run folder keeps the last 1 to 2 MB of"
            " each process's log until the server ends."
        ),
    )
)
def logs(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of a unit or a process, or supervisor. [dim]all[/dim]"),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of lines.", min=0)] = 50,
    is_followed: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow new lines until Ctrl-C.")
    ] = False,
    run_folder: Annotated[Path | None, _RUN_FOLDER] = None,
) -> None:
    """Print the latest output of a running server's processes."""
    from hadal.commands.logs import print_logs
    from hadal.commands.status import find

    try:
        print_logs(find(run_folder), name, lines, is_followed=is_followed)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)


app.command(epilog=BALANCE_EPILOG)(balance)


@app.command(
    epilog=examples(
        ("hadal explain-cache", "list the latest requests, each with its reason"),
        ("hadal explain-cache chatcmpl-0f3a", "explain one request, by its reply's id"),
        after="docs/cache-misses.md explains the reasons, and what helps.",
    )
)
def explain_cache(
    request_id: Annotated[
        str, typer.Argument(help="Id of the reply. [dim]without it: the latest requests[/dim]")
    ] = "",
    url: Annotated[
        str, typer.Option(help="URL of the server, with or without /v1.", callback=server_url)
    ] = URL,
    api_key: Annotated[
        str, typer.Option(help="Key with which the request was sent.", envvar="HADAL_API_KEY")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain why a request's prompt was not found in the cache: the first token that differs from
    the nearest earlier prompt, its message, and both texts there.
    """
    from hadal.commands.explain_cache import print_explanations

    print_explanations(request_id, url, api_key, as_json=as_json)


@app.command(
    epilog=examples(
        (
            "hadal completion bash >> ~/.bashrc",
            "Tab completes commands and options in new shells",
        ),
        (
            "hadal completion zsh >> ~/.zshrc",
            "the same in zsh; put the lines after compinit",
        ),
        ("hadal completion fish > ~/.config/fish/completions/hadal.fish", "the same in fish"),
    )
)
def completion(shell: Annotated[Shell, typer.Argument(help="Name of the shell.")]) -> None:
    """Print a shell script that completes hadal's commands and options."""
    typer.echo(
        get_completion_script(prog_name="hadal", complete_var=COMPLETE_VARIABLE, shell=shell.value)
    )


app.command(epilog=BENCH_EPILOG)(bench)
app.command(epilog=MODEL_EPILOG)(model)
app.add_typer(keys_app, name="keys")


app.command(epilog=STEP_EPILOG)(step)


app.command(epilog=SIMULATE_EPILOG)(simulate)


app.command(epilog=REPLAY_EPILOG)(replay)


app.command(epilog=CONSOLE_EPILOG)(console)


app.command(epilog=PLAN_EPILOG)(plan)


def _unbroken(commands: typer.Typer) -> None:
    """Join the lines of each command's docstring, so that help wraps at the terminal's width."""
    for command in commands.registered_commands:
        command.help = " ".join((command.callback.__doc__ or "").split())


for _commands in (app, keys_app):
    _unbroken(_commands)


if __name__ == "__main__":
    app()

"""`hadal`: the commands. Each loads what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hadal import __version__
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
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_dir: Annotated[Path | None, typer.Option(help="Folder for a log file per process, instead of stderr.")] = None,
    run_folder: Annotated[
        Path | None, typer.Option(help="Folder for sockets and status.json. [dim]a temporary one[/dim]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No banner, warnings only.")] = False,
) -> None:
    """Serve a model over the OpenAI API, by a gateway, a prefill unit and a decode unit, each a process of its own."""
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
        overrides = {"model": model, "host": host, "port": port, "model_name": model_name}
        resolved = resolve(_deployment(config, overrides))
        keys = _api_keys(api_key or [])
        options = Options(run_folder, log_dir, level, keys)
        banner = Banner(resolved, needs_key=bool(keys))
        code = run(resolved, options, (lambda status: None) if quiet else banner)
    except ConfigError as error:
        typer.echo(f"hadal serve: {error}", err=True)
        code = EXIT_CONFIG
    sys.exit(code)


def _deployment(config: Path | None, overrides: dict[str, Any]) -> Deployment:
    if config is not None:
        return read_deployment(config, **overrides)
    return Deployment(**{name: value for name, value in overrides.items() if value is not None})


def _api_keys(given: list[str]) -> tuple[str, ...]:
    keys = [*given, *os.environ.get("HADAL_API_KEYS", "").split(",")]
    if any("," in key for key in given):
        raise ConfigError("--api-key: a key cannot hold a comma.")
    return tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))


if __name__ == "__main__":
    app()

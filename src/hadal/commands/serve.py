"""Options of `hadal serve`, which override the deployment file, and checks of combinations."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hadal.commands.examples import examples
from hadal.commands.keys import FILE_VARIABLE
from hadal.core.balance import OFF
from hadal.core.config import Deployment, read_deployment
from hadal.core.errors import EXIT_CONFIG, ConfigError

_Tables = dict[str, dict[str, Any]]
EPILOG = examples(
    ("hadal serve", "serve the model that ships with Hadal, on port 8000"),
    (
        "hadal serve --model ~/models/my-v3 --port 9000",
        "serve any DeepSeek-V3 checkpoint in a Hugging Face folder",
    ),
    (
        "hadal serve --config configs/laptop.toml",
        "use a deployment file; this one lists and explains every setting",
    ),
    (
        "hadal serve --config FILE --dry-run",
        "print the processes, their places and memory, without starting anything",
    ),
    ("hadal serve --cache-folder ~/kv --cache-mb 20000", "keep KV on disk across restarts"),
    (
        "hadal serve --drafts auto",
        "speculative decoding with the model's MTP module, where it is faster",
    ),
    ("hadal serve --gateways 2", "two gateway processes on one port"),
    (
        "hadal serve --host 0.0.0.0 --api-keys-file keys.txt",
        "serve a network; clients must send one of the keys",
    ),
    after="Ctrl-C waits for running streams to finish; a second Ctrl-C ends them.",
)


def serve(
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face folder of the model. [dim]HADAL_MODEL,"
            " else the model that ships with Hadal[/dim]"
        ),
    ] = None,
    accept_config: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Unknown key of the model's JSON files to ignore, written as in the error"
                " message: rope_parameters.KEY. May be given more than once."
            ),
            metavar="KEY",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Deployment file (TOML), or the name of one that ships with Hadal, such as"
            " laptop_ep. Options override it."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address; 0.0.0.0 for all of them. [dim]127.0.0.1[/dim]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 chooses a free one. [dim]8000[/dim]")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API. [dim]the folder's name[/dim]")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="API key to accept. For trials only: other users of this machine can read it"
            " in the process list."
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            envvar=FILE_VARIABLE,
            show_envvar=False,
            help=(
                "File of accepted API keys, one per line, readable by you alone (chmod"
                " 600). Changes apply while the server runs. `hadal keys` writes it."
                " Rights follow a key: 'priority' (priority requests), 'operator'"
                " (/audit, /trace)."
            ),
        ),
    ] = None,
    open_to_network: Annotated[
        bool,
        typer.Option(
            "--open-to-network",
            help=(
                "Serve a network without keys: everyone who reaches the address may use"
                " the model, read files and batches, and operate the server."
            ),
        ),
    ] = False,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with the secret by which processes authenticate to each other"
                " (chmod 600). [dim]random at start[/dim]"
            )
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help=(
                "Hosts of the units: local (this host), or ray or ray:ADDRESS (nodes of a"
                " Ray cluster that includes this host). [dim]local[/dim]"
            )
        ),
    ] = None,
    gateways: Annotated[
        int | None,
        typer.Option(
            help="Number of gateway processes, all on one port. [dim]1[/dim]", min=1, max=64
        ),
    ] = None,
    console_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the pages (chat and console). [dim]8001[/dim]", min=0, max=65535
        ),
    ] = None,
    no_console: Annotated[bool, typer.Option("--no-console", help="Serve no pages.")] = False,
    drafts: Annotated[
        str | None,
        typer.Option(
            help=(
                "Speculative tokens that the model's MTP module drafts per decode step: 0"
                " to 3, or auto (up to 2, while it is faster). Output tokens stay the"
                " same. [dim]0[/dim]"
            )
        ),
    ] = None,
    cache_folder: Annotated[
        str | None,
        typer.Option(help="Folder for the KV cache on disk; '' for none. [dim]none[/dim]"),
    ] = None,
    cache_mb: Annotated[
        int | None,
        typer.Option(help="Largest size of the cache folder, MB. [dim]4096[/dim]", min=1),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Log level: debug, info, warning or error.")
    ] = "info",
    log_format: Annotated[
        str, typer.Option(help="Log format: text, or json (one object per line, for programs).")
    ] = "text",
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for log files, one per process, instead of stderr.")
    ] = None,
    run_folder: Annotated[
        Path | None,
        typer.Option(help="Folder for sockets and status.json. [dim]a temporary one[/dim]"),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no banner and only warnings.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print topology, memory and expert map without starting anything. Needs no"
            " weights.",
        ),
    ] = False,
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs: a gateway, prefill units and decode units,
    each of one process or of many.
    """
    if drafts is not None and drafts not in ("auto", "0", "1", "2", "3"):
        raise typer.BadParameter("use 0, 1, 2, 3 or auto.", param_hint="--drafts")
    engine, _, address = (on or "").partition(":")
    if on is not None and (engine not in ("local", "ray") or (address and engine == "local")):
        raise typer.BadParameter("use local, ray or ray:ADDRESS.", param_hint="--on")
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

    forks = Forks(environment())  # Started first, because it takes longest.
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
        if quiet or log_format == JSON:  # Otherwise the banner shows these warnings.
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


def _dry_run(
    config: Path | None,
    overrides: dict[str, Any],
    tables: _Tables,
    log: tuple[str, str],
    keys: tuple[list[str], Path | None, bool],
) -> int:
    """Print the plan. Return the exit code: 0, or EXIT_CONFIG if options, files or this machine
    allow no plan.
    """
    from hadal.commands.served import read_served_text
    from hadal.runtime.plan_rows import print_plan
    from hadal.runtime.process.logs import check_log
    from hadal.runtime.resolve import has_tokenizer, plan, why_not_run

    try:
        check_log(*log)
        resolved = plan(_deployment(config, overrides, tables))
        _keys_for(resolved.deployment, *keys)
        folder = Path(resolved.deployment.model)
        # A folder with weights or a tokenizer must be servable; a config.json alone can be planned.
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
    """Return the deployment with changed fields: `overrides` at its top level, `tables` in its
    tables. None keeps a field's value.
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
    """Return the accepted API keys. Raises ConfigError for invalid keys, or if a network would be
    served without keys and `is_open` does not allow it.
    """
    from hadal.core.handshake import is_near

    keys = _api_keys(given, path)
    if not keys and not is_open and not is_near(deployment.host):
        raise ConfigError(
            f"host is {deployment.host}, and there are no API keys: everyone who reaches"
            " this address could use the model, read files and batches, and operate the"
            " server. Make keys with `hadal keys add NAME` and serve with --api-keys-file"
            " keys.txt. To serve without keys: --open-to-network."
        )
    return keys


def _api_keys(given: list[str], path: Path | None = None) -> tuple[str, ...]:
    from hadal.gateway.desk.keys import keys_of, read_lines

    if any(not key.strip() for key in given):
        raise ConfigError(
            "--api-key is empty; give a key, or omit the option to serve without keys."
        )
    keys = [*given, *filter(str.strip, os.environ.get("HADAL_API_KEYS", "").split(","))]
    for key in keys:
        _check_key(key, "--api-key or HADAL_API_KEYS")
    if path is not None:
        in_file = read_lines(path)
        if not in_file:
            raise ConfigError(f"{path} has no keys. Write one key per line.")
        keys_of(keys, path, in_file)
        keys += in_file
    return tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))


def _check_key(line: str, where: str) -> None:
    from hadal.gateway.desk.auth import parse_key

    try:
        parse_key(line)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None

"""`hadal keys`: make, list and revoke the API keys of a keys file. A running server applies changes
within about three seconds.
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hadal.commands.errors import Commands
from hadal.commands.examples import examples

KEY_BYTES = 32
PREFIX = "sk-hadal-"
FILE_VARIABLE = "HADAL_API_KEYS_FILE"
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make, list and revoke API keys in a keys file, also while a server uses it.",
    epilog=examples(
        ("hadal keys add alice --file keys.txt", "add a key; it is printed only once"),
        (
            "hadal keys add bob --tokens-per-minute 60000 --requests 8 --dollars-per-day 5",
            "add a key with quotas",
        ),
        ("hadal keys revoke alice", "remove the key; the server rejects it from then on"),
        ("hadal keys forget alice", "delete the files and batches of the revoked tenant"),
        ("hadal serve --api-keys-file keys.txt", "start a server that accepts these keys"),
    ),
)
_File = Annotated[Path, typer.Option("--file", help="Path of the keys file.", envvar=FILE_VARIABLE)]
_FILE = Path("keys.txt")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the tenant, in the ledger and in logs.")],
    file: _File = _FILE,
    weight: Annotated[
        float,
        typer.Option(
            help="Weight of the tenant when capacity is short, relative to other tenants'."
        ),
    ] = 1.0,
    tokens_per_minute: Annotated[
        int,
        typer.Option(
            help="Maximum number of tokens per minute, input and output. [dim]no limit[/dim]", min=0
        ),
    ] = 0,
    requests: Annotated[
        int,
        typer.Option(
            help="Maximum number of requests at the same time. [dim]no limit[/dim]", min=0
        ),
    ] = 0,
    dollars_per_day: Annotated[
        str, typer.Option(help="Maximum cost in dollars per day (UTC). [dim]no limit[/dim]")
    ] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="Model that the tenant may use. [dim]all[/dim]")
    ] = None,
    right: Annotated[
        list[str] | None, typer.Option(help="Right of the key: priority or operator.")
    ] = None,
) -> None:
    """Make a key, add its hash to the file, and print the key. It cannot be printed again."""
    from hadal.core.errors import ConfigError
    from hadal.gateway.desk.auth import RIGHTS, check_name, hashed
    from hadal.gateway.desk.keys import add_line

    key = f"{PREFIX}{secrets.token_urlsafe(KEY_BYTES)}"
    for one in model or ():
        if not one or len(one.split()) != 1 or "," in one:
            raise ConfigError(f"--model is {one[:70]!r}; use a name without blanks.")
    for one in right or ():
        if one not in RIGHTS:
            raise ConfigError(f"--right is {one[:70]!r}; use {' or '.join(sorted(RIGHTS))}.")
    values: list[tuple[str, Any]] = [
        ("name", check_name("the name", name)),
        *([("weight", f"{weight:g}")] if weight != 1.0 else []),
        *([("tokens_per_minute", tokens_per_minute)] if tokens_per_minute else []),
        *([("requests", requests)] if requests else []),
        *([("dollars_per_day", dollars_per_day)] if dollars_per_day else []),
        *(("model", one) for one in model or ()),
    ]
    words = [hashed(key), *(f"{field}={value}" for field, value in values), *(right or ())]
    was_revoked = add_line(file, " ".join(words))
    if was_revoked:
        typer.echo(
            f"{name} was revoked before. The new key owns that tenant's files, batches and"
            f" stored responses. If this is another tenant: hadal keys revoke {name};"
            f" hadal keys forget {name}.",
            err=True,
        )
    typer.echo(f"The key of {name}. No file contains it, so store it now:", err=True)
    typer.echo(key)


@app.command("list")
def list_keys(
    file: _File = _FILE,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print the file's tenants with their quotas and rights, without keys."""
    from hadal.gateway.desk.auth import Tenant, parse_key
    from hadal.gateway.desk.keys import read_lines
    from hadal.stats.prices import PICO_PER_MICRO

    def fields(tenant: Tenant) -> dict[str, Any]:
        quota = tenant.quota
        return {
            "name": tenant.name,
            "is_hashed": not tenant.salt,
            "weight": tenant.weight,
            "tokens_per_minute": quota.tokens_per_minute if quota else 0,
            "requests": quota.requests if quota else 0,
            "dollars_per_day": quota.day_pico_usd / PICO_PER_MICRO / 1e6 if quota else 0.0,
            "models": sorted(tenant.models),
            "rights": sorted(tenant.rights),
        }

    tenants = [fields(parse_key(line)[1]) for line in read_lines(file)]
    if as_json:
        typer.echo(json.dumps(tenants, indent=2))
        return
    for tenant in tenants:
        said = [f"weight {tenant['weight']:g}"]
        said += [
            f"{tenant[field]:,} {words}"
            for field, words in (
                ("tokens_per_minute", "tokens a minute"),
                ("requests", "at once"),
                ("dollars_per_day", "dollars a day"),
            )
            if tenant[field]
        ]
        said += [f"only {', '.join(tenant['models'])}"] * bool(tenant["models"])
        said += tenant["rights"]
        said += ["its key is in the file as plain text"] * (not tenant["is_hashed"])
        typer.echo(f"{tenant['name']}: {', '.join(said)}")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the tenant, as `hadal keys list` shows it.")],
    file: _File = _FILE,
) -> None:
    """Remove a tenant's key from the file. Servers read the file once a second."""
    from hadal.gateway.desk.keys import remove_name

    remove_name(file, name)
    typer.echo(
        f"The key of {name} is removed from {file}. A server that uses this file rejects"
        " it within about three seconds."
    )


@app.command()
def forget(
    name: Annotated[
        str, typer.Argument(help="Name of the tenant, as `hadal keys list` showed it.")
    ],
    file: _File = _FILE,
    store: Annotated[
        str,
        typer.Option(
            "--batches",
            help="Store of the server's batches: `batches.url` of its deployment. auto:"
            " beside the ledger, as with `hadal serve`.",
        ),
    ] = "auto",
    ledger: Annotated[
        str, typer.Option(help="Ledger of the server: `ledger.url` of its deployment.")
    ] = "auto",
    port: Annotated[
        int, typer.Option(help="Port of the server; part of the name of its batch store's file.")
    ] = 8000,
) -> None:
    """Delete the files and batches of a revoked tenant, also while a server runs. A running server
    keeps the tenant's stored responses in memory until it ends.
    """
    from hadal.core.errors import ConfigError
    from hadal.gateway.desk.keys import names_in
    from hadal.runtime.batches import BatchStore, batches_url
    from hadal.runtime.ledger.address import file_of

    if file.exists() and name in names_in(file):
        raise ConfigError(f"{name} has a key. Revoke it first: hadal keys revoke {name}.")
    url = batches_url(store, ledger, port)
    path = file_of(url) if url else None
    if not url or (path is not None and not path.exists()):
        raise ConfigError(
            f"there is no store of batches at {path or 'the default place'}; name it with"
            " --batches, --ledger or --port."
        )
    batches = BatchStore(url)
    num_files, num_batches, num_left = batches.forget_tenant(name)
    batches.close()
    typer.echo(f"{num_files} files and {num_batches} batches of {name} are deleted.")
    if num_left:
        typer.echo(f"{num_left} batches have not ended. Run this again when they have.")
        sys.exit(1)

"""Check of a server's address, for every command that connects to a running server."""

from __future__ import annotations

from urllib.parse import urlsplit

import typer

from hadal.core.documents import shown

URL = "http://127.0.0.1:8000"
EXIT_ADDRESS = 2
MAX_URL_CHARS = 2000


def server_url_or_none(parameter: typer.CallbackParam, given: str) -> str:
    """Return the address as `server_url` does, and accept an empty one."""
    return server_url(parameter, given) if given else ""


def server_url(parameter: typer.CallbackParam, given: str) -> str:
    """Return the address if a client can use it; otherwise print an error and exit with 2."""
    try:
        parts = urlsplit(given)
        is_good = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        )
    except ValueError:  # For example a port of six digits, or an open bracket.
        is_good = False
    if not is_good or not given.isprintable() or len(given) > MAX_URL_CHARS:
        name = "URL" if parameter.param_type_name == "argument" else "--url"
        typer.echo(f"hadal: {name} is {shown(given)}; use an address such as {URL}.", err=True)
        raise typer.Exit(EXIT_ADDRESS)
    return given

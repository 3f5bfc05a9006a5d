"""Options of `hadal console`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hadal.commands.address import server_url_or_none
from hadal.commands.examples import examples
from hadal.core.errors import ConfigError

EPILOG = examples(
    ("hadal console", "serve pages for a server on this host that was started with --no-console"),
    (
        "hadal simulate --frames peak.gz; hadal console --frames peak.gz",
        "show 278 simulated nodes at the published peak",
    ),
    after="`hadal serve` starts the pages itself.",
)


def console(
    frames: Annotated[
        Path | None,
        typer.Option(
            help="Recording that `hadal simulate --frames` wrote, to show instead of a server."
        ),
    ] = None,
    run_folder: Annotated[
        Path | None,
        typer.Option(
            help="Run folder of a server. [dim]that of the only server on this host[/dim]"
        ),
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            help="URL of a server on another host: the pages show what its API reports."
            " [dim]none[/dim]",
            callback=server_url_or_none,
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="Address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.", min=0, max=65535)] = 8001,
    open_to_network: Annotated[
        bool,
        typer.Option(
            "--open-to-network",
            help="Serve a network without keys: everyone who reaches the address sees the console.",
        ),
    ] = False,
) -> None:
    """Serve the pages: a chat with a running server, and its console."""
    from hadal.apps.console.process import serve_alone
    from hadal.commands.status import find
    from hadal.core.handshake import is_near

    if not is_near(host) and not open_to_network:
        raise ConfigError(
            f"--host is {host}, and the pages ask for no key: everyone who reaches this"
            " address would see the console. To allow it: --open-to-network."
        )
    is_here = frames is None and not url
    folder = find(run_folder).folder if is_here else None
    serve_alone(folder, frames, url, host, port, lambda pages: typer.echo(f"{pages}/console"))

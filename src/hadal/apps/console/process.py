"""`python -m hadal.apps.console.process --folder RUN`: process that serves the pages. It does not
load torch, and only it loads NiceGUI.

    browser <-- pages, one WebSocket each --> this process --> the gateway's HTTP API
                                                           --> the run folder, the ledger: read only

The gateway does not depend on this process: if it fails, requests continue, and the supervisor
restarts it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from nicegui import ui
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hadal.apps.console.asking import Asking
from hadal.apps.console.chat import add_chat
from hadal.apps.console.feed import Feed, LiveSource, RecordedSource
from hadal.apps.console.page import add_console
from hadal.apps.console.shell import STATIC, add_assets
from hadal.core.config import GATEWAY_HEARTBEAT_S, GatewayConfig
from hadal.core.errors import EXIT_CONFIG, ConfigError
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.gateways import GatewayHeartbeat
from hadal.gateway.desk.frames import read_frames
from hadal.gateway.edge.guard import Edge
from hadal.runtime.ledger.address import ledger_url
from hadal.runtime.listener import open_listener, url_of
from hadal.runtime.process.process import LISTEN_FD, add_epoch_arguments, enter_child, read_run
from hadal.runtime.process.status import read_status
from hadal.runtime.topology import CONSOLE
from hadal.runtime.wire import open_wire

log = logging.getLogger("hadal.apps.console")

_NICE = 5
"""Niceness of this process: requests have priority over pages if cores are short."""
_SHUTDOWN_S = 1
_STARTED_S = 0.05
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval';"
    " style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:;"
    " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy: browsers load nothing from other hosts, even if a model links to it."""


class Guard:
    """Outermost ASGI layer: applies the gateway edge's rules on hosts and origins, to WebSockets
    too, and sends `_POLICY` to the browser.
    """

    def __init__(self, app: ASGIApp, edge: Edge) -> None:
        self._app = app
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._edge.refusal(headers.get("host", ""), headers.get("origin"))
        if refusal is not None:
            if scope["type"] == "http":
                await PlainTextResponse(refusal, 403)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [
                    (b"content-security-policy", _POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        await self._app(scope, receive, send_marked)


def make_app(asking: Asking | None, feed: Feed, settings: GatewayConfig, host: str) -> ASGIApp:
    """Return the pages as an ASGI application. `asking`: None if there is no server to chat with;
    then `/` redirects to the console.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    add_assets()
    add_console(feed)
    if asking is not None:
        add_chat(asking)
    else:
        app.add_api_route("/", lambda: RedirectResponse("/console"))
    ui.run_with(
        app,
        title="Hadal",
        favicon=STATIC / "icon.svg",
        dark=None,
        reconnect_timeout=20.0,
        show_welcome_message=False,
        tailwind=False,  # Tailwind's script reads the whole page at every change.
    )
    return Guard(app, Edge(app, settings, host, has_keys=False, now=time.monotonic))


def server_of(app: ASGIApp) -> uvicorn.Server:
    """Return a uvicorn server for the pages, without log lines below ERROR."""
    for name in ("uvicorn", "nicegui", "socketio", "engineio", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            ws="websockets-sansio",
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
    )


async def _serve(server: uvicorn.Server, listening: socket.socket, asking: Asking | None) -> None:
    await server.serve([listening])
    if asking is not None:
        await asking.close()


def serve_alone(
    folder: Path | None,
    frames: Path | None,
    url: str,
    host: str,
    port: int,
    announce: Callable[[str], None],
) -> None:
    """Serve the pages of the run in `folder` or of a server at `url`, or replay `frames`, until
    interrupted. `announce` is called with the address. Raises ConfigError.
    """
    asking = None
    settings = GatewayConfig()
    source: RecordedSource | LiveSource
    if frames is not None:
        source = RecordedSource(read_frames(frames))
    elif folder is None:
        asking = Asking(url)
        source = LiveSource(asking, None, "")
    else:
        deployment, status = read_run(folder).deployment, read_status(folder)
        if status is None:
            raise ConfigError(f"{folder}: its supervisor has ended; start the server again.")
        settings, ledger = deployment.gateway, deployment.ledger.url
        asking = Asking(status.url)
        source = LiveSource(asking, folder, ledger_url(ledger) if ledger else "")
    server = server_of(make_app(asking, Feed(source), settings, host))
    with open_listener(host, port) as listening:
        announce(url_of(listening, host))
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(server, listening, asking))


def main() -> int:
    """Serve the pages until a signal ends the process; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_epoch_arguments(parser)
    arguments = parser.parse_args()
    run = enter_child(CONSOLE, arguments.folder)
    os.nice(_NICE)
    try:
        wire = open_wire(run, CONSOLE, arguments.folder, arguments.epoch_number)
        status = read_status(arguments.folder)
        if status is None:
            raise ConfigError(f"{arguments.folder}: no supervisor answers there.")
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    deployment = run.deployment
    asking = Asking(status.url)
    ledger = deployment.ledger.url
    feed = Feed(LiveSource(asking, arguments.folder, ledger_url(ledger) if ledger else ""))
    app = make_app(asking, feed, deployment.gateway, deployment.host)
    server = server_of(app)

    async def beat() -> None:
        while not server.started:
            await asyncio.sleep(_STARTED_S)
        while True:
            wire.send(SUPERVISOR, GatewayHeartbeat(CONSOLE, os.getpid()))
            await asyncio.sleep(GATEWAY_HEARTBEAT_S)

    async def serve() -> None:
        beating = asyncio.create_task(beat())
        await _serve(server, socket.socket(fileno=int(os.environ[LISTEN_FD])), asking)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    try:
        asyncio.run(serve())
        return 0
    finally:
        wire.close()


if __name__ == "__main__":
    sys.exit(main())

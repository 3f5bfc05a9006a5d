"""The gateway of `world` behind a real port, in a thread, for clients that need sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from hadal.gateway.desk.service import ServedModel
from hadal.gateway.process import server_config
from tests.waiting import join, wait_for, wait_until

from .fake_units import Script
from .world import World, world


@dataclass
class Serving:
    url: str
    world: World
    address: tuple[str, int]


@contextmanager
def serving(
    model: ServedModel, script: Script, *, port: int = 0, **options: Any
) -> Iterator[Serving]:
    """Yield a server that runs until the block ends. At the end, wait until no request is open.
    `port` 0: any free port.
    """
    listener = socket.create_server(("127.0.0.1", port))
    address = listener.getsockname()
    ready = threading.Event()
    shared: dict[str, Any] = {}

    async def run() -> None:
        async with world(model, script, **options) as it:
            server = uvicorn.Server(server_config(it.gateway, it.more))
            shared.update(world=it, server=server)
            task = asyncio.create_task(server.serve([listener]))
            await wait_for(lambda: server.started, "the gateway listens")
            ready.set()
            await task
            await it.settle()

    thread = threading.Thread(target=lambda: shared.update(error=_error_of(run)), daemon=True)
    thread.start()
    wait_until(lambda: ready.is_set() or "error" in shared, "the gateway is ready")
    assert ready.is_set(), shared
    try:
        yield Serving(f"http://127.0.0.1:{address[1]}", shared["world"], address)
    finally:
        shared["server"].should_exit = True
        join(thread)
        listener.close()
    assert shared["error"] is None


def _error_of(run: Any) -> BaseException | None:
    try:
        asyncio.run(run())
    except BaseException as error:
        return error
    return None

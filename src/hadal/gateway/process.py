"""`python -m hadal.gateway.process --folder RUN --name gateway-1`: a gateway's process. Loads no
torch.

The one named "gateway" runs the front; others send their generations to it. When a gateway ends,
its streams end. The supervisor restarts it on the listening socket that all gateways of a host
share.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import FrameType

import uvicorn
import uvloop

from hadal.core.config import GATEWAY_HEARTBEAT_S, Deployment
from hadal.core.errors import EXIT_CONFIG, ConfigError, HadalError
from hadal.core.facts import RequestFact
from hadal.core.messages.base import FRONT
from hadal.gateway.app import make_app
from hadal.gateway.assembly import make_gateway
from hadal.gateway.batch_pages import BatchPages
from hadal.gateway.desk.accounting import HEARTBEAT_S
from hadal.gateway.desk.batches import BatchWorker
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.edge.connection import GatewayProtocol
from hadal.gateway.edge.descriptors import ConnectionLimit, descriptor_limit
from hadal.gateway.endpoints import Endpoint
from hadal.runtime.batches import BatchesDown, BatchStore, batches_url
from hadal.runtime.ledger.address import ledger_url
from hadal.runtime.ledger.spent import read_spent
from hadal.runtime.listener import open_listener
from hadal.runtime.process.process import (
    EXIT_FATAL,
    HAS_SERVED,
    LISTEN_FD,
    Run,
    add_epoch_arguments,
    enter_child,
)
from hadal.runtime.topology import GATEWAY
from hadal.runtime.wire import open_wire

log = logging.getLogger("hadal.gateway")

_SHUTDOWN_S = 2
"""Maximum time for open connections to close after the last request, seconds."""
_STARTED_S = 0.01
"""Period of checking if the keys have arrived, and if the port is served."""
_TELL_S = 10.0
"""Time between two log lines about generations still running while draining."""
_SPENT_S = 1.0
"""Time between two checks if the ledger has to be read for a tenant with a budget."""
_AGAIN_S = 1.0
"""Time before a failed background task restarts."""
_KEYS_KNOWN_S = 10.0
"""Maximum wait of a gateway without the front for its keys; then it serves and refuses requests."""
_SWITCH_INTERVAL_S = 0.0001
"""Longest time for which the tokenising thread may hold the GIL while streams wait for it."""


class _Server(uvicorn.Server):
    """uvicorn server that lets running requests finish after SIGTERM."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, end at once on the second."""
        if self._drain_started:
            self.should_exit = self.force_exit = True
        self._drain_started = True
        self._drain()

    _drain_started = False


def listener_of(run: Run, environment: dict[str, str]) -> socket.socket:
    """Return the supervisor's listening socket, or one at the node's address if none is given.
    Raises ConfigError.
    """
    given = environment.get(LISTEN_FD)
    if given is None:
        return open_listener(run.address, run.deployment.port)
    return socket.socket(fileno=int(given))


def server_config(gateway: Gateway, more: Sequence[Endpoint] = ()) -> uvicorn.Config:
    """Return uvicorn's configuration; `more`: endpoints in addition to the gateway's own."""
    limit = ConnectionLimit(descriptor_limit(), gateway.clock.now)
    gateway.metrics.show_connections(lambda: limit.num_refused)

    class Limited(GatewayProtocol):
        connection_limit = limit

    # uvicorn's own log reports every start and every client that does not send HTTP: noise here.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return uvicorn.Config(
        make_app(gateway, more),
        http=Limited,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )


async def serve(deployment: Deployment, gateway: Gateway, listening: socket.socket) -> int:
    """Serve until drained or failed. Return the exit code."""
    loop = asyncio.get_running_loop()
    worker = _batch_worker(gateway, deployment)
    config = server_config(gateway, BatchPages(gateway, worker).endpoints() if worker else ())

    def drain() -> None:
        loop.call_soon_threadsafe(gateway.link.drain)

    server = _Server(config, drain)
    fronting = loop.create_task(gateway.link.run())
    draining = loop.create_task(_drained(gateway.link, deployment.drain_timeout_s))
    serving = loop.create_task(_serve_port(server, gateway, listening))
    beating = loop.create_task(_heartbeat(server, gateway.link))
    batching = loop.create_task(_work_on(worker, gateway))
    beside = [
        loop.create_task(_kept(what, begin))
        for what, begin in (
            ("following the API keys", gateway.tenancy.follow),
            ("reading tenants' spending", lambda: _read_spent(gateway, worker)),
            ("recording which units are up", lambda: _count_nodes(gateway)),
        )
    ]
    done, _ = await asyncio.wait((fronting, draining, serving), return_when=asyncio.FIRST_COMPLETED)
    failed = fronting in done
    if failed:
        log.critical("the front ended", exc_info=fronting.exception())
    server.should_exit = True
    await serving
    ending = (fronting, draining, batching, *beside)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
    gateway.service.close()
    if (chat := gateway.service.model.chat) is not None:
        await loop.run_in_executor(None, chat.close)  # Waits for a prompt that is being rendered.
    gateway.link.end()
    if (
        gateway.desk.accounting is not None
    ):  # May wait for its database. Not on the loop, which sends heartbeats.
        await loop.run_in_executor(None, gateway.desk.accounting.end)
    if worker is not None:
        await loop.run_in_executor(None, worker.close)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    return EXIT_FATAL if failed else 0


def _batch_worker(gateway: Gateway, deployment: Deployment) -> BatchWorker | None:
    """Return the worker for batches, or None without batches. A down database is retried."""
    url = batches_url(deployment.batches.url, deployment.ledger.url, deployment.port)
    return BatchWorker(gateway, BatchStore(url), deployment.batches) if url else None


async def _kept(what: str, begin: Callable[[], Awaitable[None]]) -> None:
    """Run a background task until cancelled. Restart it after failures, which end no stream."""
    while True:
        try:
            await begin()
            return
        except Exception:
            log.exception("%s failed; restarting it", what)
        await asyncio.sleep(_AGAIN_S)


async def _work_on(worker: BatchWorker | None, gateway: Gateway) -> None:
    """Answer batches in the gateway with the front, until cancelled."""
    if worker is not None and gateway.link.has_front:
        gateway.metrics.show_batches(
            lambda: (worker.num_waiting, worker.num_running, worker.outcomes)
        )
        await worker.run()


async def _serve_port(server: uvicorn.Server, gateway: Gateway, listening: socket.socket) -> None:
    """Serve the port until the server exits. A gateway without the front first waits for the keys,
    at most _KEYS_KNOWN_S; gateways with keys answer meanwhile.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_KEYS_KNOWN_S):
            while not (gateway.link.has_front or gateway.tenancy.keys.is_known):
                await asyncio.sleep(_STARTED_S)
    await server.serve([listening])


async def _heartbeat(server: uvicorn.Server, link: FrontLink) -> None:
    """Send heartbeats from the event loop, once the port is served, until cancelled."""
    while not server.started:
        await asyncio.sleep(_STARTED_S)
    while True:
        link.heartbeat(os.getpid())
        await asyncio.sleep(GATEWAY_HEARTBEAT_S)


async def _read_spent(gateway: Gateway, worker: BatchWorker | None) -> None:
    """Send the front today's spending of tenants with budgets, once per tenant, until cancelled."""
    link, loop = gateway.link, asyncio.get_running_loop()
    url, was_said = ledger_url(gateway.deployment.ledger.url), False
    while link.has_front:
        gateway.tenancy.keep_time()
        if tenants := link.unread():
            try:
                of_batches: list[RequestFact] = []
                if worker is not None:
                    # With charges of the batch store: some may count twice, but none is missed.
                    with suppress(BatchesDown):
                        of_batches = await worker.call(worker.store.charges)
                unix_s = gateway.clock.unix_time()
                link.spent(
                    await loop.run_in_executor(None, read_spent, url, tenants, unix_s, of_batches)
                )
                was_said = False
            except (HadalError, OSError, sqlite3.Error) as error:
                if not was_said:
                    log.error(
                        "requests of tenants with budgets are held, because the ledger cannot be read: %s",
                        error,
                    )
                was_said = True
        await asyncio.sleep(_SPENT_S)


async def _count_nodes(gateway: Gateway) -> None:
    """Record periodically in the ledger which units are up, until cancelled."""
    while gateway.desk.accounting is not None:
        await asyncio.sleep(HEARTBEAT_S)
        gateway.desk.accounting.look()


async def _drained(link: FrontLink, timeout_s: float) -> None:
    """Return once a drain was requested and all generations ended, or after the timeout."""
    await link.wait_draining()
    now = asyncio.get_running_loop().time
    end_s = now() + timeout_s
    while (left_s := end_s - now()) > 0.0:
        if link.num_open:
            log.info("draining: %d generations still run; time left: %.0f s", link.num_open, left_s)
        if await link.wait_idle(min(left_s, _TELL_S)):
            return
    log.warning("%d generations did not end within %g s", link.num_open, timeout_s)


def main() -> int:
    """Run until drained or failed. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_epoch_arguments(parser)
    parser.add_argument("--name", default=GATEWAY, help="this gateway's name at the supervisor")
    parser.add_argument(
        HAS_SERVED, action="store_true", help="set if a predecessor of this gateway has served"
    )
    arguments = parser.parse_args()
    run = enter_child(arguments.name, arguments.folder)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # A lane tokenises one text at a time; threads of the tokenizers library would only take CPU
    # cores from the ranks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment = dict(os.environ)
    has_front = arguments.name == GATEWAY
    name = FRONT if has_front else arguments.name
    wire = open_wire(run, name, arguments.folder, arguments.epoch_number)
    try:
        gateway = make_gateway(
            run.deployment,
            wire,
            environment,
            run.fingerprint,
            run.run_id,
            name=arguments.name,
            has_served=arguments.has_served,
            folder=arguments.folder,
        )
        for number, tenant in enumerate(gateway.tenancy.keys.tenants, 1):
            log.info("API key %d is tenant %s in the ledger", number, tenant.name)
        listening = listener_of(run, environment)
        gc.collect()
        gc.freeze()  # Objects so far are permanent: no collection needs to visit them again.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(run.deployment, gateway, listening))
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    finally:
        wire.close()


if __name__ == "__main__":
    sys.exit(main())

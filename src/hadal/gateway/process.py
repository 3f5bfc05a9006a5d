"""`python -m hadal.gateway.process --folder RUN`: the gateway's process. Loads no torch.

It holds the front, so its end ends every stream; the supervisor starts it again on the same listening socket.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.gateway.auth import Keys
from hadal.gateway.books import BEAT_S, Books
from hadal.gateway.connection import GatewayProtocol
from hadal.gateway.host import Host
from hadal.gateway.http import Gateway, Patience, make_app
from hadal.gateway.metrics import Metrics
from hadal.gateway.service import Service, read_served_model
from hadal.roles.front import Front
from hadal.roles.recording import MadeFront
from hadal.runtime.clock import LiveClock
from hadal.runtime.ledger_place import ledger_url, shown, spool_place
from hadal.runtime.ledger_spool import Spool
from hadal.runtime.ledger_store import Store
from hadal.runtime.ledger_writer import LedgerWriter
from hadal.runtime.listen import open_listener
from hadal.runtime.process import API_KEYS, EXIT_CONFIG, EXIT_FATAL, LISTEN_FD, enter_child
from hadal.runtime.recorder import recorded
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.gateway")

_SHUTDOWN_S = 2
"""For connections that are still open when nothing runs any more."""
_SWITCH_INTERVAL_S = 0.0005
"""How long the tokenising thread may hold the interpreter while streams want it."""


class _Server(uvicorn.Server):
    """uvicorn, with SIGTERM meaning: finish what runs."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        if self._drain_started:
            self.should_exit = self.force_exit = True
        self._drain_started = True
        self._drain()

    _drain_started = False


def make_gateway(
    deployment: Deployment, wire: ZmqWire, environment: dict[str, str], fingerprint: str = "", run_id: str = ""
) -> Gateway:
    """Put the parts together. `fingerprint`: as roles/front has it; `run_id`: for a recording. Raises ConfigError."""
    folder = Path(deployment.model)
    model = read_served_model(folder, deployment.model_name or folder.name)
    clock = LiveClock()
    made = MadeFront(os.urandom(8).hex(), model.context_tokens, fingerprint)
    front = recorded(
        Front(deployment, epoch=made.epoch, max_context=made.max_context, fingerprint=fingerprint),
        "front", made, run_id, deployment,
    )  # fmt: skip
    books = None
    if url := ledger_url(deployment.ledger.url):
        sink = open_ledger(url)
        books = Books(deployment, model.name, sink, lambda: front.units.by_name, clock.now, time.time)
    return Gateway(
        service=Service(model, deployment.limits, front.names),
        host=Host(front, wire, clock.now, books.look if books else lambda: None),
        snapshot=front.snapshot,
        metrics=Metrics(front.snapshot, (lambda: books.counts) if books else None),
        keys=Keys(key.strip() for key in environment.get(API_KEYS, "").split(",")),
        now=clock.now,
        created=int(time.time()),
        unix_time=time.time,
        patience=Patience(keep_alive_s=deployment.keep_alive_s),
        books=books,
    )


def open_ledger(url: str) -> LedgerWriter:
    """Start to write a ledger. Raises LedgerError if there is something else; one that is down now is waited for."""
    writer = LedgerWriter(Store(url), Spool(*spool_place(url)))
    writer.start()
    log.info("the ledger is %s", shown(url))
    return writer


def listener_of(deployment: Deployment, environment: dict[str, str]) -> socket.socket:
    """The supervisor's listening socket, or one of our own where there is none. Raises ConfigError."""
    given = environment.get(LISTEN_FD)
    if given is None:
        return open_listener(deployment.host, deployment.port)
    return socket.socket(fileno=int(given))


def server_config(gateway: Gateway) -> uvicorn.Config:
    """How uvicorn serves the gateway."""
    # Its own log tells of every start and of every client that speaks no HTTP; neither is news.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return uvicorn.Config(
        make_app(gateway), http=GatewayProtocol, log_config=None, access_log=False, lifespan="off", ws="none",
        server_header=False, timeout_keep_alive=75, timeout_graceful_shutdown=_SHUTDOWN_S,
    )


async def serve(deployment: Deployment, gateway: Gateway, listening: socket.socket) -> int:
    """Serve until drained or failed; returns the exit code."""
    loop = asyncio.get_running_loop()
    config = server_config(gateway)

    def drain() -> None:
        loop.call_soon_threadsafe(gateway.host.drain)

    server = _Server(config, drain)
    fronting = loop.create_task(gateway.host.run())
    draining = loop.create_task(_drained(gateway.host, deployment.drain_timeout_s))
    serving = loop.create_task(server.serve([listening]))
    counting = loop.create_task(_count_nodes(gateway))
    done, _ = await asyncio.wait((fronting, draining, serving), return_when=asyncio.FIRST_COMPLETED)
    failed = fronting in done
    if failed:
        log.critical("the front ended", exc_info=fronting.exception())
    server.should_exit = True
    await serving
    for task in (fronting, draining, counting):
        task.cancel()
    await asyncio.gather(fronting, draining, counting, return_exceptions=True)
    gateway.service.close()
    if gateway.books is not None:
        gateway.books.end()
    return EXIT_FATAL if failed else 0


async def _count_nodes(gateway: Gateway) -> None:
    """Tell the ledger now and then which units are up, until cancelled."""
    while gateway.books is not None:
        await asyncio.sleep(BEAT_S)
        gateway.books.look()


async def _drained(host: Host, timeout_s: float) -> None:
    """Return once a drain was asked for and everything that ran has ended."""
    await host.wait_draining()
    log.info("draining: generations that still run: %d", host.num_open)
    if not await host.wait_idle(timeout_s):
        log.warning("%d generations did not end within %g s", host.num_open, timeout_s)


def main() -> int:
    """Run until drained or failed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="run folder of the supervisor")
    arguments = parser.parse_args()
    run = enter_child(arguments.folder)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # One text at a time is tokenised; threads of the tokenizers library would only take cores from the ranks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment = dict(os.environ)
    wire = ZmqWire("front", arguments.folder)
    try:
        gateway = make_gateway(run.deployment, wire, environment, run.fingerprint, run.run_id)
        for number, tenant in enumerate(gateway.keys.tenants, 1):
            log.info("API key %d is tenant %s in the ledger", number, tenant)
        listening = listener_of(run.deployment, environment)
        gc.collect()
        gc.freeze()  # What is there now stays: no collection need look at it again.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(run.deployment, gateway, listening))
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    finally:
        wire.close()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m hadal.gateway.process --folder RUN --name gateway-1`: a gateway's process. Loads no
torch.

The one named "gateway" holds the front, the others pass their generations on to it. The end of one
ends its streams; the supervisor starts it again on the listening socket that all of a host share.
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
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from hadal.core.config import GATEWAY_HEARTBEAT_S, Deployment
from hadal.core.errors import EXIT_CONFIG, ConfigError, HadalError
from hadal.core.facts import RequestFact
from hadal.core.messages import FRONT
from hadal.gateway.app import make_app
from hadal.gateway.batch_pages import BatchPages
from hadal.gateway.desk.accounting import HEARTBEAT_S, Accounting
from hadal.gateway.desk.auth import Keys
from hadal.gateway.desk.batches import BatchWorker
from hadal.gateway.desk.far_host import FarHost
from hadal.gateway.desk.gateway import Gateway, Patience
from hadal.gateway.desk.health import missing_of
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.keys import PATH, KeysFile, KeysHeard, follow
from hadal.gateway.desk.metrics import Metrics
from hadal.gateway.desk.service import Service, read_served_model
from hadal.gateway.edge.connection import GatewayProtocol
from hadal.gateway.edge.descriptors import ConnectionLimit, descriptor_limit
from hadal.gateway.endpoints import Endpoint
from hadal.roles.front.front import Front
from hadal.roles.front.requests import FrontNames
from hadal.roles.recording import MadeFront
from hadal.runtime.batches import BatchesDown, BatchStore, batches_url
from hadal.runtime.ledger.outbox import LedgerOutbox
from hadal.runtime.ledger.spent import read_spent
from hadal.runtime.ledger.store import Store, ledger_url, outbox_of, shown
from hadal.runtime.ledger.writer import LedgerWriter
from hadal.runtime.process.child import read_status, wrong_nodes
from hadal.runtime.process.forks import API_KEYS, API_KEYS_FILE
from hadal.runtime.process.process import (
    EXIT_FATAL,
    HAS_SERVED,
    LISTEN_FD,
    LiveClock,
    Run,
    add_life_arguments,
    enter_child,
)
from hadal.runtime.recorder import recorded
from hadal.runtime.topology import GATEWAY, gateway_names, open_listener
from hadal.runtime.wire import ZmqWire, open_wire

log = logging.getLogger("hadal.gateway")

_SHUTDOWN_S = 2
"""Seconds that connections which are still open have when nothing runs any more."""
_STARTED_S = 0.01
"""Period of looking whether the port is served yet."""
_TELL_S = 10.0
"""Time between two lines of the log that say what still runs at the end."""
_SPENT_S = 1.0
"""Time between two looks whether the ledger has to be read for a tenant with a budget."""
_AGAIN_S = 1.0
"""Time until what failed beside the streams begins again."""
_KEYS_S = 2.0
"""How long a gateway without the front waits for the keys before it asks again."""
_KEYS_KNOWN_S = 10.0
"""How long such a gateway may take to know them before it serves without."""
_SWITCH_INTERVAL_S = 0.0001
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
    deployment: Deployment,
    wire: ZmqWire,
    environment: dict[str, str],
    fingerprint: str = "",
    run_id: str = "",
    *,
    name: str = GATEWAY,
    has_served: bool = False,
    folder: Path | None = None,
) -> Gateway:
    """Put the parts together. `fingerprint`: as roles/front has it; `run_id`: for a recording;
    `name`: whose process it is; `has_served`: another gateway did before this one; `folder`: of the
    run, where the supervisor says how the nodes of a cluster are. Raises ConfigError.
    """
    path = Path(deployment.model)
    model = read_served_model(path, deployment.model_name or path.name, deployment.accept_config)
    clock, url = LiveClock(), ledger_url(deployment.ledger.url)
    sink = open_ledger(url) if url else None
    accounting: Accounting | None = None
    refused: dict[str, dict[str, int]] = {}
    host: Host | FarHost
    if name == GATEWAY:
        made = MadeFront(os.urandom(8).hex(), model.context_tokens, fingerprint)
        front = Front(
            deployment, epoch=made.epoch, max_context=made.max_context, fingerprint=fingerprint
        )
        front = recorded(front, FRONT, made, run_id, deployment)
        names, snapshot = front.names, front.snapshot
        if sink is not None:
            accounting = Accounting(
                deployment, model.name, sink, lambda: front.units.by_name, clock.now, time.time
            )
        host = Host(
            front,
            wire,
            clock.now,
            accounting.look if accounting else lambda: None,
            epoch=made.epoch,
            others=gateway_names(deployment)[1:],
        )
        refused = host.process_to_refused
    else:
        names = FrontNames(deployment.cache, fingerprint)
        host = FarHost(name, wire, clock.now, names)
        snapshot = host.snapshot
        if sink is not None:  # Which units are up, the gateway with the front writes.
            accounting = Accounting(deployment, model.name, sink, dict, clock.now, time.time)
    gateway = Gateway(
        service=Service(model, deployment.limits, names),
        host=host,
        snapshot=snapshot,
        metrics=Metrics(
            snapshot,
            (lambda: accounting.counts) if accounting else None,
            refused,
            name if len(gateway_names(deployment)) > 1 else "",
            lambda: accounting.tier_to_pico_usd if accounting else {},
            lambda: _starts(folder),
            partial(missing_of, deployment),
        ),
        keys=Keys(),
        now=clock.now,
        created=int(time.time()),
        unix_time=time.time,
        patience=Patience(keep_alive_s=deployment.keep_alive_s),
        accounting=accounting,
        deployment=deployment,
        bound_host=deployment.host,
        was_ready=has_served,
        wrong_nodes=lambda: _wrong_nodes(folder),
        cores=lambda: _cores(folder),
        ledger_url=url,
        name=name,
    )
    _set_keys(gateway, environment)
    return gateway


def _set_keys(gateway: Gateway, environment: dict[str, str]) -> None:
    """The keys of the start, and where others come from. A file that cannot be read now lets nobody
    in until it can be. Raises ConfigError.
    """
    given = [key.strip() for key in environment.get(API_KEYS, "").split(",")]
    path, host, accounting = environment.get(API_KEYS_FILE, ""), gateway.host, gateway.accounting
    if not path:
        gateway.keys = Keys(given)
    elif isinstance(host, Host):
        file = KeysFile(given, Path(path))

        async def changed() -> Keys | None:
            return file.changed()

        try:
            gateway.keys = file.changed() or gateway.keys
        except ConfigError as error:
            log.error("nobody is let in: %s", error)
            gateway.keys = Keys(is_closed=True, is_known=False)
        gateway.keys_changed, gateway.keys_page = changed, file.page
    else:
        far = host
        gateway.keys = Keys(is_closed=True, is_known=False)
        gateway.keys_changed = KeysHeard(
            lambda query: far.pages.ask(FRONT, PATH, query, _KEYS_S)
        ).changed
    has_budgets = gateway.check_budgets(gateway.keys)
    if accounting is not None and (path or has_budgets):
        accounting.on_charged = host.charged


def _wrong_nodes(folder: Path | None) -> Sequence[str]:
    status = read_status(folder) if folder is not None else None
    return wrong_nodes(status) if status is not None else ()


def _starts(folder: Path | None) -> dict[str, int]:
    status = read_status(folder) if folder is not None else None
    if status is None:
        return {}
    return {name: process.num_starts for name, process in status.processes.items()}


def _cores(folder: Path | None) -> dict[str, tuple[int, ...]]:
    status = read_status(folder) if folder is not None else None
    if status is None:
        return {}
    return {name: process.cores for name, process in status.processes.items() if process.cores}


def open_ledger(url: str) -> LedgerWriter:
    """Start to write a ledger. Raises LedgerError if there is something else; one that is down now
    is waited for.
    """
    writer = LedgerWriter(Store(url), LedgerOutbox(outbox_of(url)))
    writer.start()
    log.info("the ledger is %s", shown(url))
    return writer


def listener_of(run: Run, environment: dict[str, str]) -> socket.socket:
    """The supervisor's listening socket or, on a node, where there is none, one of our own at the
    node's address. Raises ConfigError.
    """
    given = environment.get(LISTEN_FD)
    if given is None:
        return open_listener(run.address, run.deployment.port)
    return socket.socket(fileno=int(given))


def server_config(gateway: Gateway, more: Sequence[Endpoint] = ()) -> uvicorn.Config:
    """How uvicorn serves the gateway; `more`: endpoints besides its own."""
    limit = ConnectionLimit(descriptor_limit(), gateway.now)
    gateway.metrics.show_connections(lambda: limit.num_refused)

    class Limited(GatewayProtocol):
        connection_limit = limit

    # Its own log notes every start, and every client that speaks no HTTP; neither is news.
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
    """Serve until drained or failed; returns the exit code."""
    loop = asyncio.get_running_loop()
    worker = _batch_worker(gateway, deployment)
    config = server_config(gateway, BatchPages(gateway, worker).endpoints() if worker else ())

    def drain() -> None:
        loop.call_soon_threadsafe(gateway.host.drain)

    server = _Server(config, drain)
    fronting = loop.create_task(gateway.host.run())
    draining = loop.create_task(_drained(gateway.host, deployment.drain_timeout_s))
    serving = loop.create_task(_serve_port(server, gateway, listening))
    beating = loop.create_task(_heartbeat(server, gateway.host))
    batching = loop.create_task(_work_on(worker, gateway))
    beside = [
        loop.create_task(_kept(what, begin))
        for what, begin in (
            ("following the API keys", lambda: _follow_keys(gateway)),
            ("reading what tenants spent", lambda: _read_spent(gateway, worker)),
            ("writing down which units are up", lambda: _count_nodes(gateway)),
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
        await loop.run_in_executor(None, chat.close)  # It waits for a prompt under way.
    gateway.host.end()
    if (
        gateway.accounting is not None
    ):  # It may wait for its database: whoever sends the heartbeat meanwhile waits as well.
        await loop.run_in_executor(None, gateway.accounting.end)
    if worker is not None:
        await loop.run_in_executor(None, worker.close)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    return EXIT_FATAL if failed else 0


def _batch_worker(gateway: Gateway, deployment: Deployment) -> BatchWorker | None:
    """None: there are no batches here. A database that is down now is waited for."""
    url = batches_url(deployment.batches.url, deployment.ledger.url, deployment.port)
    return BatchWorker(gateway, BatchStore(url), deployment.batches) if url else None


async def _kept(what: str, begin: Callable[[], Awaitable[None]]) -> None:
    """Do what streams do not wait for, until cancelled: where it fails it is told and begun again,
    and no stream ends for it.
    """
    while True:
        try:
            await begin()
            return
        except Exception:
            log.exception("%s failed; it begins again", what)
        await asyncio.sleep(_AGAIN_S)


async def _work_on(worker: BatchWorker | None, gateway: Gateway) -> None:
    """Answer what batches ask, in the gateway that has the front, until cancelled."""
    if worker is not None and isinstance(gateway.host, Host):
        gateway.metrics.show_batches(
            lambda: (worker.num_waiting, worker.num_running, worker.outcomes)
        )
        await worker.run()


async def _serve_port(server: uvicorn.Server, gateway: Gateway, listening: socket.socket) -> None:
    """Serve the port until told to end. A gateway without the front begins when it knows the keys,
    unless that takes too long: those that have them answer meanwhile.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_KEYS_KNOWN_S):
            while isinstance(gateway.host, FarHost) and not gateway.keys.is_known:
                await asyncio.sleep(_STARTED_S)
    await server.serve([listening])


async def _heartbeat(server: uvicorn.Server, host: Host | FarHost) -> None:
    """Tell the supervisor that the event loop turns, from when the port is served until
    cancelled.
    """
    while not server.started:
        await asyncio.sleep(_STARTED_S)
    while True:
        host.heartbeat(os.getpid())
        await asyncio.sleep(GATEWAY_HEARTBEAT_S)


async def _follow_keys(gateway: Gateway) -> None:
    """Let in whom the keys name, until cancelled."""
    gateway.take_keys(gateway.keys)  # Now that there is a loop, the front hears of the quotas.
    if gateway.keys_changed is not None:
        await follow(gateway.keys_changed, gateway.take_keys)


async def _read_spent(gateway: Gateway, worker: BatchWorker | None) -> None:
    """Tell the front what tenants with budgets spent today, once of each, until cancelled."""
    host, loop = gateway.host, asyncio.get_running_loop()
    was_said = False
    while isinstance(host, Host):
        gateway.keep_time()
        if tenants := host.unread():
            try:
                of_batches: list[RequestFact] = []
                if worker is not None:
                    with suppress(BatchesDown):  # Then some may count twice, and none too little.
                        of_batches = await worker.call(worker.store.charges)
                url, unix_s = gateway.ledger_url, gateway.unix_time()
                host.spent(
                    await loop.run_in_executor(None, read_spent, url, tenants, unix_s, of_batches)
                )
                was_said = False
            except (HadalError, OSError, sqlite3.Error) as error:
                if not was_said:
                    log.error("tenants with budgets wait, as the ledger cannot be read: %s", error)
                was_said = True
        await asyncio.sleep(_SPENT_S)


async def _count_nodes(gateway: Gateway) -> None:
    """Write to the ledger now and then which units are up, until cancelled."""
    while gateway.accounting is not None:
        await asyncio.sleep(HEARTBEAT_S)
        gateway.accounting.look()


async def _drained(host: Host | FarHost, timeout_s: float) -> None:
    """Return once a drain was asked for and everything that ran has ended."""
    await host.wait_draining()
    now = asyncio.get_running_loop().time
    end_s = now() + timeout_s
    while (left_s := end_s - now()) > 0.0:
        if host.num_open:
            log.info("ending: %d generations still run, and have %.0f s", host.num_open, left_s)
        if await host.wait_idle(min(left_s, _TELL_S)):
            return
    log.warning("%d generations did not end within %g s", host.num_open, timeout_s)


def main() -> int:
    """Run until drained or failed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_life_arguments(parser)
    parser.add_argument("--name", default=GATEWAY, help="this gateway's, at the supervisor")
    parser.add_argument(
        HAS_SERVED, action="store_true", help="another gateway served before this one"
    )
    arguments = parser.parse_args()
    run = enter_child(arguments.name, arguments.folder)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # One text at a time is tokenised; threads of the tokenizers library would only take cores from
    # the ranks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment = dict(os.environ)
    has_front = arguments.name == GATEWAY
    name = FRONT if has_front else arguments.name
    wire = open_wire(run, name, arguments.folder, arguments.life)
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
        for number, tenant in enumerate(gateway.keys.tenants, 1):
            log.info("API key %d is tenant %s in the ledger", number, tenant.name)
        listening = listener_of(run, environment)
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

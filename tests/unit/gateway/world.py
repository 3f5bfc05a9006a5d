"""A whole gateway in this process: real application, host and front, and units without a model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from hadal.core.config import BatchesConfig, Deployment, GatewayConfig, LimitsConfig
from hadal.core.messages.generation import Generation
from hadal.gateway.app import make_app
from hadal.gateway.batch_pages import BatchPages
from hadal.gateway.desk.auth import Keys
from hadal.gateway.desk.batches import BatchWorker
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.explanations import cache_explainer
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.service import ServedModel, Service
from hadal.gateway.edge.connection import WRITE
from hadal.gateway.edge.intake import Patience
from hadal.gateway.endpoints import Endpoint
from hadal.roles.front.front import Front
from hadal.runtime.batches import BatchStore
from tests.waiting import DEADLINE_S, wait_for

from .fake_units import UNIT_TIMEOUT_S, FakeUnits, Script
from .parts import gateway_with

CHAT = {"model": "small", "messages": [{"role": "user", "content": "2 + 2?"}]}


@dataclass
class Clock:
    """Clock of a gateway that stands still until a test moves it."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def spell(model: ServedModel, text: str, *, then_stop: bool = True) -> Script:
    """Return a script that writes `text`, then ends its turn (or starts again)."""
    ids = model.vocabulary.encode_controlled(text)

    def script(generation: Generation, index: int) -> int:
        if index < len(ids):
            return ids[index]
        return model.eos_ids[0] if then_stop else ids[index % len(ids)]

    return script


@dataclass
class World:
    app: ASGIApp
    client: httpx.AsyncClient
    units: FakeUnits
    gateway: Gateway
    more: Sequence[Endpoint] = ()
    """Endpoints of files and batches, besides the gateway's own."""
    pages: BatchPages | None = None
    worker: BatchWorker | None = None
    """Worker that answers batches while it runs."""

    def chat(
        self, headers: dict[str, str] | None = None, **fields: Any
    ) -> Awaitable[httpx.Response]:
        """Send a chat request: CHAT with other fields."""
        return self.client.post("/v1/chat/completions", json=CHAT | fields, headers=headers)

    async def settle(self) -> None:
        """Wait until nothing is open and the units hold nothing."""
        it = self.gateway
        await wait_for(
            lambda: not (self.units.num_held or it.link.num_open or len(it.intake.permits)),
            "nothing is open, and the units hold nothing",
        )


def gateway_of(
    model: ServedModel,
    units: FakeUnits,
    *,
    limits: LimitsConfig | None = None,
    keys: tuple[str, ...] = (),
    patience: Patience | None = None,
    settings: GatewayConfig | None = None,
    bound_host: str = "",
    now: Callable[[], float] = time.monotonic,
    has_ledger: bool = False,
) -> Gateway:
    """Return a gateway, assembled as its process does it, with `units` as its wire."""
    limits = limits or LimitsConfig()
    deployment = Deployment(
        model="x",
        limits=limits,
        gateway=settings or GatewayConfig(),
        unit_timeout_s=UNIT_TIMEOUT_S,
    )
    front = Front(deployment, epoch="epoch", max_context=model.context_tokens, fingerprint="f0")
    clock = GatewayClock(now)
    explainer = cache_explainer(deployment.gateway, model.vocabulary, clock)
    return gateway_with(
        Host(front, units, now),
        Service(model, limits, front.names, explainer=explainer),
        deployment,
        clock,
        keys=Keys(keys),
        patience=patience,
        bound_host=bound_host,
        has_ledger=has_ledger,
    )


def with_outlet(app: ASGIApp) -> ASGIApp:
    """Return the application behind a connection to which streams can write by themselves."""

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        def write(data: bytes) -> bool:
            message = {"type": "http.response.body", "body": data, "more_body": True}
            with contextlib.suppress(StopIteration):
                send(message).send(None)  # type: ignore[attr-defined]
                raise AssertionError("this send waits for nothing")
            return True

        scope[WRITE] = write
        await app(scope, receive, send)

    return behind


@asynccontextmanager
async def world(
    model: ServedModel,
    script: Script,
    *,
    limits: LimitsConfig | None = None,
    keys: tuple[str, ...] = (),
    patience: Patience | None = None,
    step_s: float = 0.0,
    settings: GatewayConfig | None = None,
    bound_host: str = "",
    now: Callable[[], float] = time.monotonic,
    store: BatchStore | None = None,
    batches: BatchesConfig | None = None,
    has_ledger: bool = False,
) -> AsyncIterator[World]:
    """Start a gateway and its units, yield them when they are ready, and stop them at the end.
    `store`: store of files and batches; None: the gateway serves neither.
    """
    units = FakeUnits(script, step_s)
    gateway = gateway_of(
        model,
        units,
        limits=limits,
        keys=keys,
        patience=patience,
        settings=settings,
        bound_host=bound_host,
        now=now,
        has_ledger=has_ledger,
    )
    tasks = [asyncio.create_task(gateway.link.run()), asyncio.create_task(units.run())]
    worker = BatchWorker(gateway, store, batches or BatchesConfig()) if store else None
    pages = BatchPages(gateway, worker) if worker else None
    more = pages.endpoints() if pages else []
    app = make_app(gateway, more)
    transport = httpx.ASGITransport(with_outlet(app), raise_app_exceptions=True)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=DEADLINE_S
        ) as client:
            await wait_for(lambda: gateway.link.snapshot().can_serve, "the units are up")
            yield World(app, client, units, gateway, more, pages, worker)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.service.close()
        if worker is not None:
            worker.close()

"""The routes: OpenAI's endpoints with and without /v1, health and metrics.

Each handler checks the key, the state of the service and its limits, in this order, before it reads a body. Every
refusal leaves as an ApiError.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hadal import __version__
from hadal.core.config import ROLES
from hadal.core.errors import HadalError
from hadal.core.facts import CANCELLED, REFUSALS
from hadal.gateway.auth import Keys
from hadal.gateway.body import read_body
from hadal.gateway.books import Books
from hadal.gateway.errors import ApiError, as_api_error, overloaded
from hadal.gateway.host import Host
from hadal.gateway.mailbox import Mailbox
from hadal.gateway.metrics import Metrics
from hadal.gateway.replies import ChatFormatter, CompletionFormatter, Head, ReplyFormat
from hadal.gateway.service import Service, Work
from hadal.gateway.sse import ClientGone, Reply, Times
from hadal.gateway.trace import answer_trace
from hadal.gateway.vocabulary import Vocabulary
from hadal.roles.front_snapshot import FrontSnapshot

log = logging.getLogger("hadal.gateway")

AUDIT_TIMEOUT_S = 5.0

_FINGERPRINT = f"hadal-{__version__}"


@dataclass(frozen=True)
class Patience:
    """How long clients are waited for, in seconds."""

    body_s: float = 30.0
    send_s: float = 30.0
    keep_alive_s: float = 10.0
    retry_after_s: float = 2.0


@dataclass
class Gateway:
    """Everything the handlers share."""

    service: Service
    host: Host
    snapshot: Callable[[], FrontSnapshot]
    metrics: Metrics
    keys: Keys
    now: Callable[[], float]
    created: int
    """Unix time at start."""
    unix_time: Callable[[], float]
    patience: Patience = Patience()
    books: Books | None = None
    """None: there is no ledger."""
    was_ready: bool = False
    """Units that were up once come back: until then requests wait at the front."""
    num_requests: int = 0
    """HTTP requests for a generation that are being worked on."""

    def check_open(self) -> None:
        """Raise ApiError 503 while there is nobody to do the work."""
        retry_after_s = self.patience.retry_after_s
        if self.host.draining:
            raise overloaded(503, "The server is shutting down; try again later.", retry_after_s, "draining")
        self.was_ready = self.was_ready or is_ready(self.snapshot())
        if not self.was_ready:
            raise overloaded(503, "The server is starting; try again.", retry_after_s, "no_units")

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the places for requests. Raises ApiError 429."""
        limits = self.service.limits
        if self.num_requests >= limits.max_running + limits.max_queued:
            raise overloaded(
                429, f"{self.num_requests} requests are being worked on already; try again.",
                self.patience.retry_after_s, "too_many_requests",
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


def is_ready(snapshot: FrontSnapshot) -> bool:
    """True when a request can be answered from end to end."""
    return all(snapshot.role_to_units.get(role, 0) for role in ROLES)


class Generate:
    """One of the two generating endpoints, as an ASGI application of its own: it must see the client leave."""

    def __init__(
        self,
        gateway: Gateway,
        name: str,
        id_prefix: str,
        prepare: Callable[[bytes, str, bytes], Awaitable[Work]],
        formatter: Callable[[Head, Vocabulary], ReplyFormat],
    ) -> None:
        self._gateway = gateway
        self._name = name
        self._id_prefix = id_prefix
        self._prepare = prepare
        self._formatter = formatter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        status = 500
        times = Times(gateway.now())
        request_id = f"{self._id_prefix}-{uuid.uuid4().hex}"
        tenant = None
        try:
            request = Request(scope, receive)
            tenant = gateway.keys.check(request.headers.get("authorization"))
            gateway.check_open()
            with gateway.slot():
                status = await self._answer(request, send, times, tenant, request_id)
        except HadalError as error:
            refusal = as_api_error(error)
            status = refusal.status
            if gateway.books is not None and tenant is not None and not times.is_read and str(status) in REFUSALS:
                gateway.books.refused(request_id, times.start_s, tenant, status)
            if status >= 500 and refusal is not error:
                log.error("a request failed", exc_info=error)
            raise
        except (ClientGone, ClientDisconnect):
            status = 499  # What nginx logs for a client that closed the request.
        finally:
            self._count(status, times)

    async def _answer(self, request: Request, send: Send, times: Times, tenant: bytes, request_id: str) -> int:
        gateway = self._gateway
        limits = gateway.service.limits
        body = await read_body(request, limits.max_body_bytes, gateway.patience.body_s)
        work = await self._prepare(body, request_id, tenant)
        head = Head(
            request_id, int(gateway.unix_time()), gateway.service.model.name, _FINGERPRINT, work.ask.include_usage
        )
        times.is_read = True
        mailbox = gateway.host.open(choice.generation for choice in work.choices)
        reply = Reply(
            work, mailbox, gateway.host, self._formatter(head, gateway.service.model.vocabulary), times, gateway.now,
            timeout_s=limits.request_timeout_s, keep_alive_s=gateway.patience.keep_alive_s,
            send_timeout_s=gateway.patience.send_s,
        )
        watch = asyncio.get_running_loop().create_task(_watch(request.receive, mailbox))
        end = "500"
        try:
            status = await (reply.send_stream(send) if work.ask.stream else reply.send_whole(send))
            end = str(status)
            if status == 200:
                gateway.metrics.count_usage(reply.usage)
            return status
        except (ClientGone, asyncio.CancelledError):
            end = CANCELLED
            raise
        except HadalError as error:
            end = str(as_api_error(error).status)
            raise
        finally:
            watch.cancel()
            gateway.host.close(mailbox)
            times.num_tokens = reply.usage.num_output_tokens
            if gateway.books is not None:
                gateway.books.close(work, reply.meters, mailbox.closings, times.start_s, tenant, end)

    def _count(self, status: int, times: Times) -> None:
        metrics = self._gateway.metrics
        metrics.requests.labels(self._name, str(status)).inc()
        if status != 200 or times.first_token_s is None or times.last_token_s is None:
            return
        metrics.first_token_s.observe(times.first_token_s - times.start_s)
        metrics.request_s.observe(self._gateway.now() - times.start_s)
        if times.num_tokens > 1:
            metrics.per_token_s.observe((times.last_token_s - times.first_token_s) / (times.num_tokens - 1))


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """Tell the reply when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        continue
    mailbox.leave()


def make_app(gateway: Gateway) -> Starlette:
    """The ASGI application."""
    service = gateway.service
    chat = Generate(gateway, "chat", "chatcmpl", service.chat, ChatFormatter)
    completion = Generate(gateway, "completions", "cmpl", service.completion, CompletionFormatter)
    model = {"id": service.model.name, "object": "model", "created": gateway.created, "owned_by": "hadal"}

    async def list_models(request: Request) -> Response:
        gateway.keys.check(request.headers.get("authorization"))
        return _json({"object": "list", "data": [model]})

    async def get_model(request: Request) -> Response:
        gateway.keys.check(request.headers.get("authorization"))
        asked = request.path_params["model_id"]
        if asked != service.model.name:
            raise ApiError(
                404, f"The model {asked[:100]!r} does not exist; {service.model.name!r} is served here.", param="model",
                code="model_not_found",
            )
        return _json(model)

    async def health(request: Request) -> Response:
        snapshot = gateway.snapshot()
        ready = is_ready(snapshot) and not gateway.host.draining
        state = "draining" if gateway.host.draining else "ready" if ready else "starting"
        ranks = {unit: load.num_ranks for unit, load in snapshot.unit_to_load.items()}
        fields = {"status": state, "model": service.model.name, "units_up": snapshot.role_to_units, "ranks_up": ranks}
        return _json(fields, status=200 if ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def audit(request: Request) -> Response:
        gateway.keys.check(request.headers.get("authorization"))
        problems, audits = await gateway.host.audit(gateway.snapshot().unit_to_load, AUDIT_TIMEOUT_S)
        units = {
            audit.unit: {"num_blocks_used": audit.num_blocks_used, "num_requests": audit.num_requests}
            for audit in audits
        }
        return _json({"problems": problems, "units": units}, status=500 if problems else 200)

    async def trace(request: Request) -> Response:
        gateway.keys.check(request.headers.get("authorization"))
        return _json(await answer_trace(gateway.host, gateway.snapshot().unit_to_load, request.query_params))

    routes = [Route("/health", health), Route("/metrics", metrics), Route("/audit", audit), Route("/trace", trace)]
    for prefix in ("/v1", ""):
        routes += [
            Route(f"{prefix}/chat/completions", chat, methods=["POST"]),
            Route(f"{prefix}/completions", completion, methods=["POST"]),
            Route(f"{prefix}/models", list_models),
            Route(f"{prefix}/models/{{model_id:path}}", get_model),
        ]
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: _on_http_error, HadalError: _on_error, Exception: _on_bug},
        lifespan=_no_lifespan,
    )


@asynccontextmanager
async def _no_lifespan(app: Starlette) -> AsyncIterator[None]:
    yield


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HadalError)
    return _refusal(as_api_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        return _refusal(ApiError(404, f"There is nothing at {path}; try /v1/chat/completions.", code="not_found"))
    if error.status_code == 405:
        return _refusal(
            ApiError(
                405, f"{path} does not take {method}.", code="method_not_allowed", headers=dict(error.headers or {})
            )
        )
    return _refusal(ApiError(error.status_code, error.detail, headers=dict(error.headers or {})))


async def _on_bug(request: Request, error: Exception) -> Response:
    """Anything else is ours; the server logs it as it is raised again."""
    return _refusal(as_api_error(HadalError(str(error))))


def _refusal(error: ApiError) -> Response:
    return Response(error.body, error.status, error.headers, media_type="application/json")


def _json(fields: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(fields), status, media_type="application/json")

"""The routes: OpenAI's endpoints with and without /v1, health and metrics.

A handler that generates checks the key, the state of the service and its limits, in this order,
before it reads a body. Every refusal leaves as an ApiError.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hadal import __version__
from hadal.core.config import ROLES, Deployment, units_of
from hadal.core.errors import ConfigError, HadalError
from hadal.core.facts import CANCELLED, REFUSALS, RequestFact
from hadal.core.messages import FrontSnapshot, Generation
from hadal.core.overview import EXPERTS_MAX
from hadal.gateway.accounting import Accounting
from hadal.gateway.auth import OPERATOR, Keys, Tenant, credentials
from hadal.gateway.description import (
    AUDIT,
    CHAT,
    COMPLETION,
    COUNT,
    DETOKENIZE,
    HEALTH,
    MESSAGES,
    METRICS,
    MODEL,
    MODELS,
    OPENAPI,
    RESPONSE,
    RESPONSE_DELETED,
    RESPONSE_INPUT,
    RESPONSES,
    ROOT,
    STATUS,
    TOKENIZE,
    TRACE,
    Operation,
    document,
)
from hadal.gateway.edge import SEEN, WRITE, AccessRecord, Edge
from hadal.gateway.errors import ApiError, as_api_error, overloaded
from hadal.gateway.far_host import FarHost
from hadal.gateway.host import COUNTING, Host, Page
from hadal.gateway.kept import PATH as KEPT
from hadal.gateway.kept import KeptResponse, KeptResponses, Responses
from hadal.gateway.keys import PATH as KEYS_PATH
from hadal.gateway.mailbox import Mailbox
from hadal.gateway.messages import MessagesFormatter, parse_count, parse_messages
from hadal.gateway.metrics import Metrics
from hadal.gateway.replies import ChatFormatter, CompletionFormatter, Head, ReplyFormat
from hadal.gateway.reply import ClientGone, Reply, Times
from hadal.gateway.responses import (
    ResponseAsk,
    ResponseFormatter,
    ResponsesRequest,
    input_page,
    items_in,
    listed,
    parse_response,
    read_response,
    references_of,
)
from hadal.gateway.service import Service, Work
from hadal.gateway.streams import Outlet, Streams, refuse
from hadal.gateway.trace import answer_trace
from hadal.gateway.vocabulary import Vocabulary
from hadal.policy.admission import share_of
from hadal.runtime.topology import GATEWAY, gateway_names, rank_name

# Room for requests in the gateway, by tenant: for bodies on their way, then for requests that are
# worked on.
#
#     headers --Bodies--> whole body --Permits--> answered
#
# What one tenant does to them costs no other a permit. Generations are counted by the front
# (policy/admission).


_CLOSE = {"Connection": "close"}
_DISCARD_DEADLINE_S = 2.0
"""A client that is still sending often reads no reply: swallow what it sends for this long, then
answer and close.
"""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body. Its length is counted while it streams in: Content-Length may be missing or
    a lie.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"The content type is {kind[:100]!r}; send 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            f"The content encoding is {coding[:100]!r}; send the body as it is, without one.",
            code="unsupported_media_type",
        )
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            break
        chunks.append(chunk)
    if num_bytes > max_bytes:
        await discard(request)
        raise ApiError(
            413,
            f"The body is larger than {max_bytes} bytes; send a shorter prompt.",
            code="body_too_large",
            headers=_CLOSE,
        )
    return b"".join(chunks)


async def discard(request: Request) -> None:
    """Swallow what is still sent, for a while."""
    try:
        async with asyncio.timeout(_DISCARD_DEADLINE_S):
            while (message := await request.receive())["type"] == "http.request" and message.get(
                "more_body", False
            ):
                continue
    except (TimeoutError, ClientDisconnect):
        return


MAX_BODIES = 256
"""Most bodies on their way at once. One that was sent with its headers is there as soon as it is
asked for.
"""
LEFT_S = 10.0
"""How long generations that were given up still take permits. To begin and to end one costs the
gateway half a millisecond of its one thread: a tenant that does nothing else may have 5 % of it
where there are a thousand permits.
"""


class Bodies:
    """Bodies that are waited for, each until its deadline. One more than its tenant's share pushes
    out its oldest.
    """

    def __init__(self, num_max: int = MAX_BODIES) -> None:
        self._num_max = num_max
        self._tenant_to_waits: dict[str, dict[asyncio.Timeout, None]] = {}
        """Deadlines of the bodies that each tenant sends, the oldest first."""

    def __len__(self) -> int:
        return sum(len(waits) for waits in self._tenant_to_waits.values())

    @asynccontextmanager
    async def wait(self, tenant: str, deadline_s: float) -> AsyncIterator[None]:
        """Read a body within this. Raises ApiError 408 after the deadline, 429 if its permit is
        taken from it.
        """
        waits = self._tenant_to_waits.setdefault(tenant, {})
        if len(waits) >= share_of(self._num_max, len(self._tenant_to_waits)):
            oldest = next(iter(waits))
            if not oldest.expired():  # Else its deadline was quicker: it leaves by itself.
                del waits[oldest]
                oldest.reschedule(asyncio.get_running_loop().time())
        timeout = asyncio.timeout(deadline_s)
        waits[timeout] = None
        try:
            async with timeout:
                yield
        except TimeoutError:
            if timeout in waits:
                raise ApiError(
                    408,
                    f"The body was not complete after {deadline_s:g} s; send it faster.",
                    code="request_timeout",
                    headers=_CLOSE,
                ) from None
            raise ApiError(
                429,
                "Too many bodies of this tenant are on their way; send fewer at once, and faster.",
                code="too_many_bodies",
                headers=_CLOSE,
            ) from None
        finally:
            waits.pop(timeout, None)
            if not waits and self._tenant_to_waits.get(tenant) is waits:
                del self._tenant_to_waits[tenant]


class Permits:
    """HTTP requests that are worked on, from their whole body to the end of their answer."""

    def __init__(self, num_max: int, retry_after_s: float) -> None:
        self._num_max = num_max
        self._retry_after_s = retry_after_s
        self._tenant_to_num: Counter[str] = Counter()
        self._tenant_to_left: Counter[str] = Counter()
        """Generations whose clients went away a moment ago."""

    def __len__(self) -> int:
        return self._tenant_to_num.total()

    def check(self, tenant: str) -> None:
        """Raises ApiError 429 for a tenant that has its share. Asked before a body is read, it
        spares reading it.
        """
        num_held, num_left = self._tenant_to_num[tenant], self._tenant_to_left[tenant]
        if num_held + num_left >= share_of(
            self._num_max, len(self._tenant_to_num.keys() | {tenant})
        ):
            raise overloaded(
                429,
                f"This tenant has {num_held} requests that are worked on, and {num_left}"
                f" generations that it gave up in the last {LEFT_S:g} s count as well; try again.",
                self._retry_after_s,
                "too_many_requests",
            )

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """Hold a permit. Raises as `check` does."""
        self.check(tenant)
        self._tenant_to_num[tenant] += 1
        try:
            yield
        finally:
            self._tenant_to_num[tenant] -= 1
            if not self._tenant_to_num[tenant]:
                del self._tenant_to_num[tenant]

    def left(self, tenant: str, num: int) -> None:
        """A client went away from so many generations: they take permits for LEFT_S more, so that
        to begin and give up again and again costs the tenant that does it and not the others.
        """
        self._tenant_to_left[tenant] += num
        asyncio.get_running_loop().call_later(LEFT_S, self._forget, tenant, num)

    def _forget(self, tenant: str, num: int) -> None:
        self._tenant_to_left[tenant] -= num
        if not self._tenant_to_left[tenant]:
            del self._tenant_to_left[tenant]


# What /health says: whether requests can be answered, and what of the deployment is missing.
# Values in, values out.
#
# starting   requests could not be served yet        503
# ready      everything is there                     200
# degraded   something is missing                    200, or 503 if a role has no rank left
# draining   what runs may finish, nothing begins    503


def health_of(
    deployment: Deployment,
    snapshot: FrontSnapshot,
    gateways: Collection[str],
    *,
    has_begun: bool,
    is_draining: bool,
    wrong: Sequence[str] = (),
) -> tuple[int, dict[str, object]]:
    """The reply's status and fields. `gateways`: those that are there; `has_begun`: requests could
    be served once; `wrong`: what is wrong with the nodes of a cluster.
    """
    missing = [name for name in gateway_names(deployment) if name not in gateways]
    missing += missing_of(deployment, snapshot)
    can_serve = snapshot.can_serve and not is_draining
    if is_draining:
        status = "draining"
    elif not has_begun:
        status = "starting"
    else:
        status = "degraded" if missing or wrong else "ready"
    return 200 if can_serve else 503, {
        "status": status,
        "units_up": {role: len(units) for role, units in snapshot.role_to_units.items()},
        "units_wanted": {role: units_of(deployment, role).units for role in ROLES},
        "ranks_up": {
            unit: num for units in snapshot.role_to_units.values() for unit, num in units.items()
        },
        "ranks_wanted": {
            unit: units_of(deployment, role).ranks
            for role, units in snapshot.role_to_units.items()
            for unit in units
        },
        "missing": missing,
        **({"nodes": list(wrong)} if wrong else {}),
    }


def missing_of(deployment: Deployment, snapshot: FrontSnapshot) -> Iterator[str]:
    """Names of units that are not up or have no leader ("decode-1"), and of ranks that others lack
    ("decode-0.2").

    A fleet lacks a unit when it has fewer than its floor; which of them is to come is said by
    number, from 0.
    """
    for role in ROLES:
        up, wanted = snapshot.role_to_units.get(role, {}), units_of(deployment, role).units
        down = [unit for index in range(wanted) if (unit := f"{role}-{index}") not in up]
        yield from down[: max(0, wanted - len(up))]
        for unit, num_led in up.items():
            load = snapshot.unit_to_report.get(unit)
            absent = load.absent if load is not None else ()
            if not num_led and not absent:
                # What its leader said last holds no more: its ranks wait for another one.
                yield unit
            yield from (rank_name(unit, rank) for rank in absent)


log = logging.getLogger("hadal.gateway")

AUDIT_TIMEOUT_S = 5.0
_CLOCK_S = 1.0
"""What the time of day may be off by, where days are told apart for budgets."""
COUNTS = "/counts"
"""What a gateway without the front has counted, for the metrics of the one that has it."""
COUNTS_TIMEOUT_S = 1.0

_Endpoint = Callable[[Request], Awaitable[Response]]
FINGERPRINT = f"hadal-{__version__}"
Formatter = Callable[[Head, Vocabulary], ReplyFormat]
"""Makes one reply's format."""


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
    host: Host | FarHost
    snapshot: Callable[[], FrontSnapshot]
    metrics: Metrics
    keys: Keys
    now: Callable[[], float]
    created: int
    """Unix time at start."""
    unix_time: Callable[[], float]
    patience: Patience = Patience()
    accounting: Accounting | None = None
    """None: there is no ledger."""
    deployment: Deployment = field(default_factory=Deployment)
    bound_host: str = ""
    """Where it listens; "": unknown, and then any name is answered to."""
    was_ready: bool = False
    """The server could answer once, under this gateway or the one before: units that are down come
    back, and until then requests wait at the front.
    """
    wrong_nodes: Callable[[], Sequence[str]] = tuple
    """What is wrong with the nodes of a cluster, a sentence each."""
    cores: Callable[[], Mapping[str, Sequence[int]]] = dict
    """See Overview.cores."""
    bodies: Bodies = field(default_factory=Bodies)
    keys_changed: Callable[[], Awaitable[Keys | None]] | None = None
    """Asks for the keys, if they are others now; None: they stay what they are."""
    keys_page: Page | None = None
    """What the other gateways are told of them."""
    ledger_url: str = ""
    name: str = GATEWAY
    """This process's, among the gateways."""

    _ahead_s: float = 0.0
    """What unix time was ahead of `now` when the front heard it last."""

    def __post_init__(self) -> None:
        limits = self.service.limits
        self.permits = Permits(limits.max_running + limits.max_queued, self.patience.retry_after_s)
        settings = self.deployment.gateway
        kept = KeptResponses(settings.keep_responses_mb << 20, settings.keep_responses_s, self.now)
        names = tuple(gateway_names(self.deployment))
        self.streams = Streams(self.now)
        self.responses = Responses(kept, self.host, self.name, names)

    @property
    def num_requests(self) -> int:
        """HTTP requests for a generation that are being worked on."""
        return len(self.permits)

    def check_open(self) -> None:
        """Raise ApiError 503 while there is nobody to do the work."""
        retry_after_s = self.patience.retry_after_s
        if self.host.draining:
            raise overloaded(
                503, "The server is shutting down; try again later.", retry_after_s, "draining"
            )
        if not self.has_begun():
            raise overloaded(503, "The server is starting; try again.", retry_after_s, "no_units")

    def priced(
        self, work: Work, tenant: Tenant, *, is_batch: bool = False
    ) -> tuple[Generation, ...]:
        """What is to be generated, with what it can cost where its tenant has a budget."""
        generations = tuple(choice.generation for choice in work.choices)
        if self.accounting is None or tenant.quota is None or not tenant.quota.day_pico_usd:
            return generations
        # The prompt is charged once, and nobody knows yet to which of its choices.
        n, most = work.ask.n, self.accounting.most
        likely = self.service.limits.likely_output_tokens
        is_limited = work.ask.max_tokens is not None
        return tuple(
            msgspec.structs.replace(
                one,
                most_pico_usd=most(
                    0 if at % n else len(one.prompt),
                    one.max_tokens if is_limited else min(one.max_tokens, likely),
                    is_batch=is_batch,
                ),
            )
            for at, one in enumerate(generations)
        )

    def check_budgets(self, keys: Keys) -> bool:
        """Whether a tenant has a budget. Raises ConfigError if nothing is written down then."""
        has_budgets = any(quota.day_pico_usd for quota in keys.quotas)
        if has_budgets and self.accounting is None:
            raise ConfigError("dollars_per_day needs a ledger: see [ledger] url.")
        return has_budgets

    def take_keys(self, keys: Keys) -> None:
        """Let these keys in from now on, and no others; what runs goes on. Raises ConfigError for
        a budget where nothing is written down.
        """
        self.check_budgets(keys)
        had_quotas, self.keys = bool(self.keys.quotas), keys
        if keys.quotas or had_quotas:
            self._say_quotas()

    def keep_time(self) -> None:
        """Tell the front what time it is, where it has to know and the clock was set."""
        if self.keys.quotas and abs(self.unix_time() - self.now() - self._ahead_s) > _CLOCK_S:
            self._say_quotas()

    def _say_quotas(self) -> None:
        unix_s = self.unix_time()
        self._ahead_s = unix_s - self.now()
        if isinstance(self.host, Host):
            self.host.set_quotas(unix_s, self.keys.quotas)

    def begin(
        self,
        work: Work,
        formatter: Formatter,
        generations: tuple[Generation, ...],
        request_id: str,
        times: Times,
        *,
        is_batch: bool = False,
    ) -> Reply:
        """Have generations done; the reply is of what comes of them. Whoever begins one ends it."""
        model, patience = self.service.model, self.patience
        head = Head(
            request_id,
            int(self.unix_time()),
            model.name,
            FINGERPRINT,
            work.ask.include_usage,
            work.ask.omits_reasoning,
            work.ask.has_usage_so_far,
        )
        times.is_read = True
        reply = Reply(
            work,
            self.host.open(generations),
            self.host,
            formatter(head, model.vocabulary),
            times,
            self.now,
            timeout_s=self.service.limits.request_timeout_s,
            keep_alive_s=patience.keep_alive_s,
            send_timeout_s=patience.send_s,
        )
        # A line of a batch may be tried again: it counts once, when it is charged.
        if not is_batch or self.accounting is None:
            self.metrics.output.begin(reply)
        return reply

    def end(
        self,
        reply: Reply,
        tenant: Tenant,
        end: str,
        take: Callable[[list[RequestFact]], None] | None = None,
    ) -> None:
        """Stop what still runs of a reply, and charge what it cost as soon as the front has said
        where it was worked on. `end`: as Accounting.facts has it. `take`: where a batch's facts go
        instead.
        """
        accounting = self.accounting

        def write_down() -> None:
            if accounting is not None:
                facts = accounting.facts(
                    reply.work,
                    reply.meters,
                    reply.mailbox.closings,
                    reply.times.start_s,
                    tenant,
                    end,
                    is_batch=take is not None,
                )
                (take or accounting.charge)(facts)

        self.metrics.output.end(reply)
        self.host.close(reply.mailbox, write_down)

    def has_begun(self) -> bool:
        """Whether requests could ever be served: until then the server is starting."""
        self.was_ready = self.was_ready or self.snapshot().can_serve
        return self.was_ready

    async def body_of(self, request: Request, tenant: Tenant) -> bytes:
        """The body of a request that costs work. Raises ApiError."""
        self.permits.check(tenant.name)
        async with self.bodies.wait(tenant.name, self.patience.body_s):
            return await read_body(request, self.service.limits.max_body_bytes)

    def tenant_of(self, request: Request) -> Tenant:
        """Whoever asks. Raises ApiError 401, 503."""
        return self.keys.check(credentials(request.headers))

    def check_operator(self, request: Request) -> None:
        """What counts all tenants is for those who may operate the server. Raises ApiError 401,
        403.
        """
        if OPERATOR not in self.tenant_of(request).rights:
            raise ApiError(
                403,
                "This API key has no right to operate the server; in the keys file 'operator'"
                " behind it gives it.",
                code="not_an_operator",
            )


Prepare = Callable[[bytes, str, Tenant], Awaitable[tuple[Work, Formatter]]]
"""(body, the reply's id, who asks) -> what is to be generated, and how it is answered."""


_COUNTED_STATUSES = ("200", "500", "503", "504")
"""Those whose counts are there from the start: the first failure is a rise for whoever watches."""


class Generate:
    """One of the generating endpoints, as an ASGI application of its own: it must see the client
    leave.
    """

    def __init__(self, gateway: Gateway, name: str, id_prefix: str, prepare: Prepare) -> None:
        self._gateway = gateway
        self._name = name
        self._id_prefix = id_prefix
        self._prepare = prepare
        for status in _COUNTED_STATUSES:
            gateway.metrics.requests.labels(name, status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        status = 500
        times = Times(gateway.now())
        request_id = f"{self._id_prefix}{uuid.uuid4().hex}"
        tenant = None
        seen: AccessRecord = scope[SEEN]
        seen.reply_id = request_id
        try:
            request = Request(scope, receive)
            tenant = gateway.tenant_of(request)
            seen.tenant = tenant.name
            gateway.check_open()
            body = await gateway.body_of(request, tenant)
            with gateway.permits.take(tenant.name):
                status = await self._answer(request, body, send, times, tenant, request_id)
        except HadalError as error:
            refusal = as_api_error(error)
            status = refusal.status
            gateway.metrics.refusals.labels(refusal.code or str(status)).inc()
            if (
                gateway.accounting is not None
                and tenant is not None
                and not times.is_read
                and str(status) in REFUSALS
            ):
                gateway.accounting.refused(request_id, times.start_s, tenant, status)
            if status >= 500 and refusal is not error:
                log.error("the request failed", exc_info=error)
            raise
        except (ClientGone, ClientDisconnect):
            status = seen.status = 499  # What nginx logs for a client that closed the request.
        finally:
            seen.num_tokens = times.num_tokens
            self._count(status, times)

    async def _answer(
        self,
        request: Request,
        body: bytes,
        send: Send,
        times: Times,
        tenant: Tenant,
        request_id: str,
    ) -> int:
        gateway = self._gateway
        gateway.host.check_room(tenant.name, 1)  # Or it is turned away before it costs more.
        work, formatter = await self._prepare(body, request_id, tenant)
        generations = gateway.priced(work, tenant)
        gateway.host.check_room(
            tenant.name,
            len(generations),
            sum(len(generation.prompt) for generation in generations),
            sum(generation.most_pico_usd for generation in generations),
        )
        reply = gateway.begin(work, formatter, generations, request_id, times)
        watch = asyncio.get_running_loop().create_task(_watch(request.receive, reply.mailbox))
        end = "500"
        try:
            if work.ask.stream:
                outlet = Outlet(gateway.streams, request.scope.get(WRITE, refuse))
                status = await reply.send_stream(send, outlet)
            else:
                status = await reply.send_whole(send)
            end = str(status)
            if status == 200 and times.first_token_s is not None:  # Else nothing was computed.
                gateway.metrics.count_usage(reply.usage)
            return status
        except (ClientGone, asyncio.CancelledError):
            gateway.permits.left(tenant.name, len(work.choices))
            end = CANCELLED
            raise
        except HadalError as error:
            end = str(as_api_error(error).status)
            raise
        finally:
            watch.cancel()
            times.num_tokens = reply.usage.num_output_tokens
            gateway.end(reply, tenant, end)

    def _count(self, status: int, times: Times) -> None:
        metrics = self._gateway.metrics
        metrics.requests.labels(self._name, str(status)).inc()
        if status != 200 or times.first_token_s is None or times.last_token_s is None:
            return
        metrics.first_token_s.observe(times.first_token_s - times.start_s)
        metrics.request_s.observe(self._gateway.now() - times.start_s)
        if times.num_tokens > 1:
            metrics.per_token_s.observe(
                (times.last_token_s - times.first_token_s) / (times.num_tokens - 1)
            )


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """Tell the reply when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        continue
    mailbox.leave()


async def _page(gateway: Gateway, request: Request, media_type: str) -> Response:
    """What only the process with the front knows. Raises HadalError."""
    status, body = await gateway.host.page(request.url.path, request.query_params)
    return Response(body, status, media_type=media_type)


def pages_of(gateway: Gateway, host: Host) -> dict[str, Page]:
    """The pages of the gateway whose process holds the front, for itself and for the others; not
    the API keys, which are for the others alone.
    """

    async def metrics(query: Mapping[str, str]) -> tuple[int, bytes]:
        return 200, gateway.metrics.text(await host.ask_others(COUNTS, COUNTS_TIMEOUT_S))

    async def audit(query: Mapping[str, str]) -> tuple[int, bytes]:
        problems, audits = await host.audit(gateway.snapshot().unit_to_report, AUDIT_TIMEOUT_S)
        units = {
            audit.unit: {
                "num_blocks_used": audit.num_blocks_used,
                "num_requests": audit.num_requests,
            }
            for audit in audits
        }
        return 500 if problems else 200, msgspec.json.encode({"problems": problems, "units": units})

    async def counting(query: Mapping[str, str]) -> tuple[int, bytes]:
        return 200, msgspec.json.encode(host.counting_refusal(query["tenant"]))

    async def trace(query: Mapping[str, str]) -> tuple[int, bytes]:
        return 200, msgspec.json.encode(
            await answer_trace(host, gateway.snapshot().unit_to_report, query)
        )

    async def status(query: Mapping[str, str]) -> tuple[int, bytes]:
        units = [unit for unit in query.get("experts", "").split(",") if unit][:EXPERTS_MAX]
        return 200, await _overview(gateway, host, units)

    pages: dict[str, Page] = {
        "/metrics": metrics,
        "/audit": audit,
        "/trace": trace,
        "/status": status,
        COUNTING: counting,
    }
    return pages if gateway.keys_page is None else {**pages, KEYS_PATH: gateway.keys_page}


async def _overview(gateway: Gateway, host: Host, units: Sequence[str]) -> bytes:
    """An Overview (core/overview) as JSON. `units`: whose experts are wanted; what units say of
    them is handed on unread.
    """
    snapshot, deployment = gateway.snapshot(), gateway.deployment
    roles = snapshot.role_to_units.items()
    wide = {unit for role, up in roles if units_of(deployment, role).ranks > 1 for unit in up}
    asked = [unit for unit in units if unit in wide]
    others, experts = await asyncio.gather(
        host.ask_others(COUNTS, COUNTS_TIMEOUT_S), host.experts(asked, COUNTS_TIMEOUT_S)
    )
    _, health = health_of(
        deployment,
        snapshot,
        host.gateways,
        has_begun=gateway.has_begun(),
        is_draining=host.draining,
        wrong=gateway.wrong_nodes(),
    )
    return msgspec.json.encode(
        {
            "unix_s": gateway.unix_time(),
            "model": gateway.service.model.name,
            "status": health["status"],
            "missing": health["missing"],
            "units_wanted": health["units_wanted"],
            "ranks_wanted": {role: units_of(deployment, role).ranks for role in ROLES},
            "ranks_per_node": {role: units_of(deployment, role).ranks_per_node for role in ROLES},
            "cores": gateway.cores(),
            "snapshot": snapshot,
            "latency": gateway.metrics.latency(others),
            "experts": {unit: msgspec.Raw(body) for unit, body in experts.items()},
        }
    )


def _models_pages(gateway: Gateway) -> tuple[_Endpoint, _Endpoint]:
    """The list of models, which has one, and that model by its name."""
    name = gateway.service.model.name
    model = {"id": name, "object": "model", "created": gateway.created, "owned_by": "hadal"}

    async def list_models(request: Request) -> Response:
        tenant = gateway.tenant_of(request)
        return _json({"object": "list", "data": [model] if tenant.may_ask(name) else []})

    async def get_model(request: Request) -> Response:
        tenant = gateway.tenant_of(request)
        asked = request.path_params["model_id"]
        if not asked:  # "/v1/models/"
            return await list_models(request)
        if asked != name or not tenant.may_ask(name):
            raise ApiError(
                404,
                f"The model {asked[:100]!r} does not exist; {name!r} is served here.",
                param="model",
                code="model_not_found",
            )
        return _json(model)

    return list_models, get_model


def _answering(
    gateway: Gateway,
    answer: Callable[[bytes, Tenant], Awaitable[dict[str, Any]]],
    counts: str = "",
) -> _Endpoint:
    """An endpoint that answers a body at once, for those who may generate and within their limits.
    `counts`: field of its answer with the tokens that it counted, which its tenant's quota pays for.
    """

    async def endpoint(request: Request) -> Response:
        tenant = gateway.tenant_of(request)
        request.scope[SEEN].tenant = tenant.name
        body = await gateway.body_of(request, tenant)
        with gateway.permits.take(tenant.name):
            if counts:
                await gateway.host.check_counting(tenant.name)
            fields = await answer(body, tenant)
            if counts:
                gateway.host.counted(tenant.name, fields[counts])
            return _json(fields)

    return endpoint


@dataclass(frozen=True)
class Endpoint:
    """What answers one method at one path, and at the paths of `also`."""

    method: str
    path: str
    handler: _Endpoint | Generate
    about: Operation
    also: tuple[str, ...] = ()


def _generating(gateway: Gateway) -> list[Endpoint]:
    """The endpoints that generate: each reads bodies of its own and writes replies of its own."""
    service, responses = gateway.service, gateway.responses

    async def chat(body: bytes, reply_id: str, tenant: Tenant) -> tuple[Work, Formatter]:
        return await service.chat(body, reply_id, tenant), ChatFormatter

    async def completion(body: bytes, reply_id: str, tenant: Tenant) -> tuple[Work, Formatter]:
        return await service.completion(body, reply_id, tenant), CompletionFormatter

    async def message(body: bytes, reply_id: str, tenant: Tenant) -> tuple[Work, Formatter]:
        work = await service.chat(body, reply_id, tenant, parse_messages)
        return work, partial(
            MessagesFormatter,
            max_tokens=work.ask.max_tokens or 0,
            context_tokens=service.model.context_tokens,
        )

    async def response(body: bytes, reply_id: str, tenant: Tenant) -> tuple[Work, Formatter]:
        def parse(
            request: ResponsesRequest, bodies: list[bytes], ids: list[str]
        ) -> tuple[ResponseAsk, bytes]:
            known = items_in(bodies, ids, service.limits.max_body_bytes)
            asked = parse_response(request, known)
            return asked, msgspec.json.encode(listed(asked.request.input))

        def read() -> tuple[ResponsesRequest, list[str]]:
            request = read_response(body)
            return request, references_of(request)

        request, ids = await service.off_loop(tenant, read, len(body))
        bodies = await responses.bodies_with(tenant.name, ids) if ids else []
        asked, items = await service.off_loop(
            tenant, lambda: parse(request, bodies, ids), len(body) + sum(map(len, bodies))
        )
        before = await responses.turns_before(tenant.name, asked.request.previous_response_id)
        num_before = sum(turn.num_chars for turn in before) + sum(map(len, bodies))
        work = await service.chat(body, reply_id, tenant, lambda _: asked.after(before), num_before)
        return work, partial(
            ResponseFormatter,
            asked=asked.request,
            keep=responses.keeper(tenant.name, reply_id, before, asked, items),
            sampling=work.choices[0].generation.sampling,
            now=gateway.unix_time,
        )

    def made(
        name: str, path: str, id_prefix: str, prepare: Prepare, about: Operation, *also: str
    ) -> Endpoint:
        handler = Generate(gateway, name, id_prefix, prepare)
        return Endpoint("POST", f"/v1{path}", handler, about, (path, *also))

    return [
        made("chat", "/chat/completions", "chatcmpl-", chat, CHAT, "/beta/chat/completions"),
        made("completions", "/completions", "cmpl-", completion, COMPLETION, "/beta/completions"),
        made("messages", "/messages", "msg_", message, MESSAGES, "/anthropic/v1/messages"),
        made("responses", "/responses", responses.id_prefix, response, RESPONSES),
    ]


def _responses_pages(gateway: Gateway) -> list[Endpoint]:
    """Responses that are kept."""

    async def get(request: Request) -> Response:
        if request.query_params.get("stream") not in (None, "false"):
            raise ApiError(
                400, "stream: a kept response comes whole; leave it out.", param="stream"
            )
        return Response((await found(request, "body")).body, media_type="application/json")

    async def delete(request: Request) -> Response:
        await found(request, deletes=True)
        response_id = request.path_params["response_id"]
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def items(request: Request) -> Response:
        kept = await found(request, "input")
        data = msgspec.json.decode(kept.input, type=list[dict[str, Any]])
        return _json(input_page(data, request.query_params))

    async def found(request: Request, part: str = "", *, deletes: bool = False) -> KeptResponse:
        tenant, response_id = gateway.tenant_of(request), request.path_params["response_id"]
        request.scope[SEEN].tenant = tenant.name
        kept = await gateway.responses.get(tenant.name, response_id, part, deletes=deletes)
        if kept is None:
            raise ApiError(
                404,
                f"The response {response_id[:80]!r} is not kept here for this API key.",
                param="response_id",
                code="response_not_found",
            )
        return kept

    path = "/responses/{response_id}"
    inputs = f"{path}/input_items"
    return [
        Endpoint("GET", f"/v1{path}", get, RESPONSE, (path,)),
        Endpoint("DELETE", f"/v1{path}", delete, RESPONSE_DELETED, (path,)),
        Endpoint("GET", f"/v1{inputs}", items, RESPONSE_INPUT, (inputs,)),
    ]


def _token_pages(gateway: Gateway) -> list[Endpoint]:
    """Texts in tokens and back."""
    service = gateway.service
    return [
        Endpoint("POST", f"/v1{path}", _answering(gateway, answer, counts), about, (path,))
        for path, answer, counts, about in (
            ("/tokenize", service.tokenize, "count", TOKENIZE),
            ("/detokenize", service.detokenize, "", DETOKENIZE),
        )
    ]


def endpoints_of(gateway: Gateway, more: Sequence[Endpoint] = ()) -> list[Endpoint]:
    """All that is served, `more` among it: the routes and /openapi.json follow from it."""
    service = gateway.service
    list_models, get_model = _models_pages(gateway)
    endpoints = _generating(gateway)
    documents: dict[bool, bytes] = {}

    async def count(body: bytes, tenant: Tenant) -> dict[str, Any]:
        return {"input_tokens": await service.count(body, tenant, parse_count)}

    async def openapi(request: Request) -> Response:
        is_open = gateway.keys.is_open
        if is_open not in documents:
            made = document(endpoints, service.model.name, is_open=is_open)
            documents[is_open] = msgspec.json.encode(made)
        return Response(documents[is_open], media_type="application/json")

    async def health(request: Request) -> Response:
        status, fields = health_of(
            gateway.deployment,
            gateway.snapshot(),
            gateway.host.gateways,
            has_begun=gateway.has_begun(),
            is_draining=gateway.host.draining,
            wrong=gateway.wrong_nodes(),
        )
        return _json({**fields, "model": service.model.name}, status)

    async def root(request: Request) -> Response:
        names = [f"{each.method} {each.path}" for each in endpoints if each.path != "/v1"]
        model = service.model.name
        return _json({"server": f"Hadal {__version__}", "model": model, "endpoints": names})

    async def metrics(request: Request) -> Response:
        if not gateway.deployment.gateway.open_metrics:
            gateway.check_operator(request)
        return await _page(gateway, request, "text/plain; version=0.0.4; charset=utf-8")

    async def operate(request: Request) -> Response:
        gateway.check_operator(request)
        return await _page(gateway, request, "application/json")

    needs_key = not gateway.deployment.gateway.open_metrics
    counts = "/messages/count_tokens"
    model = "/models/{model_id:path}"
    endpoints += [
        Endpoint(
            "POST",
            f"/v1{counts}",
            _answering(gateway, count, "input_tokens"),
            COUNT,
            (counts, f"/anthropic/v1{counts}"),
        ),
        *_token_pages(gateway),
        *_responses_pages(gateway),
        *more,
        Endpoint("GET", "/v1/models", list_models, MODELS, ("/models",)),
        Endpoint("GET", f"/v1{model}", get_model, MODEL, (model,)),
        Endpoint("GET", "/openapi.json", openapi, OPENAPI, ("/v1/openapi.json",)),
        Endpoint("GET", "/health", health, HEALTH),
        Endpoint("GET", "/metrics", metrics, replace(METRICS, needs_key=needs_key)),
        Endpoint("GET", "/audit", operate, AUDIT),
        Endpoint("GET", "/trace", operate, TRACE),
        Endpoint("GET", "/status", operate, STATUS),
        Endpoint("GET", "/v1", root, ROOT, ("/v1/", "/")),
    ]
    return endpoints


def routes_of(endpoints: Sequence[Endpoint]) -> list[Route]:
    """A route for each path, with all the methods that are answered there."""
    by_path: dict[str, dict[str, _Endpoint | Generate]] = {}
    for each in endpoints:
        for path in (each.path, *each.also):
            by_path.setdefault(path, {})[each.method] = each.handler
    return [
        Route(path, _by_method(handlers), methods=[*handlers]) for path, handlers in by_path.items()
    ]


def _by_method(handlers: Mapping[str, _Endpoint | Generate]) -> _Endpoint | Generate:
    first, *others = handlers.values()
    if not others:
        return first

    async def answer(request: Request) -> Response:
        handler = handlers["GET" if request.method == "HEAD" else request.method]
        assert not isinstance(handler, Generate), "it has its path to itself"
        return await handler(request)

    return answer


def make_app(gateway: Gateway, more: Sequence[Endpoint] = ()) -> ASGIApp:
    """The ASGI application; `more`: endpoints besides its own."""
    host = gateway.host
    pages = pages_of(gateway, host) if isinstance(host, Host) else {COUNTS: gateway.metrics.counted}
    host.pages.table = {**pages, KEPT: gateway.responses.page}
    app = Starlette(
        routes=routes_of(endpoints_of(gateway, more)),
        exception_handlers={
            HTTPException: _on_http_error,
            HadalError: _on_error,
            ClientDisconnect: _on_leave,
            Exception: _on_bug,
        },
        lifespan=_no_lifespan,
    )
    return Edge(
        app,
        gateway.deployment.gateway,
        gateway.bound_host,
        has_keys=not gateway.keys.is_open,
        now=gateway.now,
    )


@asynccontextmanager
async def _no_lifespan(app: Starlette) -> AsyncIterator[None]:
    yield


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HadalError)
    return _refusal(as_api_error(error), request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        return _refusal(
            ApiError(
                404,
                f"There is nothing at {path}; /openapi.json lists what is served.",
                code="not_found",
            ),
            path,
        )
    if error.status_code == 405 and method == "OPTIONS":
        return Response(
            status_code=204, headers={"Allow": f"{(error.headers or {}).get('Allow', '')}, OPTIONS"}
        )
    if error.status_code == 405:
        return _refusal(
            ApiError(
                405,
                f"{path} does not take {method}; it takes"
                f" {(error.headers or {}).get('Allow', 'other methods')}. /openapi.json lists what is"
                " served.",
                code="method_not_allowed",
                headers=dict(error.headers or {}),
            ),
            path,
        )
    return _refusal(
        ApiError(error.status_code, error.detail, headers=dict(error.headers or {})), path
    )


async def _on_bug(request: Request, error: Exception) -> Response:
    """Anything else is ours; the server logs it as it is raised again."""
    return _refusal(as_api_error(HadalError(str(error))), request.url.path)


async def _on_leave(request: Request, error: Exception) -> Response:
    """The client went away while its body was read: nobody hears this."""
    return Response(status_code=499)


def _refusal(error: ApiError, path: str) -> Response:
    body = error.body_at(path)
    return Response(body, error.status, error.headers, media_type="application/json")


def _json(fields: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(fields), status, media_type="application/json")

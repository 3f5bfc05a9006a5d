"""One generating endpoint, from a request's headers to the last byte of its reply.

Contains HTTP and the order of the checks. gateway/desk has tenants, the link to the front, and
accounting; the endpoint's dialect reads the body and writes the reply.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from hadal.core.errors import HadalError
from hadal.core.facts import CANCELLED, REFUSALS
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.dialects import Dialect
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.mailbox import Mailbox
from hadal.gateway.desk.reply import ClientGone, Times
from hadal.gateway.edge.connection import WRITE
from hadal.gateway.edge.errors import as_api_error
from hadal.gateway.edge.guard import SEEN, AccessRecord
from hadal.gateway.edge.streams import Outlet, refuse

log = logging.getLogger("hadal.gateway")
_COUNTED_STATUSES = ("200", "500", "503", "504")
"""Statuses exported from the start, so that the first failure shows as an increase."""


class Generate:
    """One generating endpoint; itself an ASGI application, to notice when the client leaves."""

    def __init__(self, gateway: Gateway, dialect: Dialect[Any]) -> None:
        self._gateway = gateway
        self._dialect = dialect
        for status in _COUNTED_STATUSES:
            gateway.metrics.requests.labels(dialect.name, status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        status = 500
        times = Times(gateway.clock.now())
        request_id = f"{self._dialect.id_prefix}{uuid.uuid4().hex}"
        tenant = None
        seen: AccessRecord = scope[SEEN]
        seen.reply_id = request_id
        try:
            request = Request(scope, receive)
            tenant = gateway.tenancy.tenant_of(request.headers)
            seen.tenant = tenant.name
            gateway.readiness.check_open()
            body = await gateway.intake.body_of(request, tenant.name)
            with gateway.intake.permits.take(tenant.name):
                status = await self._answer(request, body, send, times, tenant, request_id)
        except HadalError as error:
            refusal = as_api_error(error)
            status = refusal.status
            gateway.metrics.refusals.labels(refusal.code or str(status)).inc()
            accounting = gateway.desk.accounting
            if (
                accounting is not None
                and tenant is not None
                and not times.is_read
                and str(status) in REFUSALS
            ):
                accounting.refused(request_id, times.start_s, tenant, status)
            if status >= 500 and refusal is not error:
                log.error("the request failed", exc_info=error)
            raise
        except (ClientGone, ClientDisconnect):
            status = seen.status = 499  # nginx's status for a client that closed the request.
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
        gateway.link.check_capacity(tenant.name)  # A refusal here saves the cost of parsing.
        work = await self._dialect.parse(body, request_id, tenant)
        ticket = gateway.desk.reserve(work, tenant)
        reply = gateway.desk.begin(work, self._dialect.format(work), ticket, request_id, times)
        watch = asyncio.get_running_loop().create_task(_watch(request.receive, reply.mailbox))
        end = "500"
        try:
            if work.ask.stream:
                outlet = Outlet(gateway.streams, request.scope.get(WRITE, refuse))
                status = await reply.send_stream(send, outlet)
            else:
                status = await reply.send_whole(send)
            end = str(status)
            if status == 200 and times.first_token_s is not None:  # Otherwise nothing was computed.
                gateway.metrics.count_usage(reply.usage)
            return status
        except (ClientGone, asyncio.CancelledError):
            gateway.intake.permits.left(tenant.name, len(work.choices))
            end = CANCELLED
            raise
        except HadalError as error:
            end = str(as_api_error(error).status)
            raise
        finally:
            watch.cancel()
            times.num_tokens = reply.usage.num_output_tokens
            gateway.desk.end(reply, tenant, end)

    def _count(self, status: int, times: Times) -> None:
        metrics = self._gateway.metrics
        metrics.requests.labels(self._dialect.name, str(status)).inc()
        if status != 200 or times.first_token_s is None or times.last_token_s is None:
            return
        metrics.first_token_s.observe(times.first_token_s - times.start_s)
        metrics.request_s.observe(self._gateway.clock.now() - times.start_s)
        if times.num_tokens > 1:
            metrics.per_token_s.observe(
                (times.last_token_s - times.first_token_s) / (times.num_tokens - 1)
            )


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """Notify the reply when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        continue
    mailbox.leave()

"""Checks and records for every request: its id, the host names and origins that may ask, and its
line in the access log.

A web page can make its own name point at this server and then read it, if the server requires no
key (DNS rebinding). So a server without keys checks Host and Origin. It answers to names of this
machine, to names in its deployment, and to addresses if it serves a network. It answers pages of
its own, pages that its deployment names, and pages of this machine if it serves only this machine.
Depends on ASGI, not on routes.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hadal.core.balance import OFF
from hadal.core.config import GatewayConfig
from hadal.core.handshake import is_near
from hadal.gateway.edge.connection import WRITE
from hadal.gateway.edge.errors import ApiError, is_anthropics
from hadal.runtime.process.logs import REQUEST_ID, fields

access = logging.getLogger("hadal.access")

SEEN = "hadal.seen"
"""Scope key of the request's AccessRecord."""
_EXPOSED = b"X-Request-Id, Retry-After" + b"".join(
    b", X-RateLimit-%s-%s" % (what, of)
    for of in (b"Requests", b"Tokens")
    for what in (b"Limit", b"Remaining", b"Reset")
)
METHODS = "GET, POST, DELETE, OPTIONS"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$&'*+.^_`|~, -]{1,1024}")
_POLLED = ("/health", "/metrics", "/status", "/v1/explain_cache")
"""Paths polled by machines every few seconds; successes are logged at debug level only."""


@dataclass
class AccessRecord:
    """Facts about a request for its line in the access log, filled in while the request runs."""

    request_id: str
    status: int = 0
    num_tokens: int = 0
    tenant: str = "-"
    reply_id: str = ""
    """The `id` in the body of the answer."""


class Edge:
    """Outermost layer of the application."""

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewayConfig,
        host: str,
        *,
        has_keys: bool,
        now: Callable[[], float],
    ) -> None:
        """`host`: the listening address. "": no Host is checked, and Origin only for OPTIONS."""
        self._app = app
        self._settings = settings
        self._is_local = is_loopback(host)
        self._now = now
        self._guards = bool(host) and not has_keys
        self._hosts = frozenset(name.lower() for name in (host, *settings.allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        seen = AccessRecord(asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex)
        scope[SEEN] = seen
        id_token = REQUEST_ID.set(seen.request_id)
        start_s = self._now()
        origin = headers.get("origin")
        allows = origin is not None and self._allows(origin)
        extra = [(b"x-request-id", seen.request_id.encode())]
        if is_anthropics(scope["path"]):
            extra.append((b"request-id", seen.request_id.encode()))  # Anthropic's header name.
        if origin is not None and allows:
            extra += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"vary", b"Origin"),
                (b"access-control-expose-headers", _EXPOSED),
            ]

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = seen.status or message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        try:
            answer = self._answer(scope, headers, origin, allows)
            await (self._app if answer is None else answer)(scope, receive, send_marked)
        finally:
            self._log(scope, seen, (self._now() - start_s) * 1000)
            REQUEST_ID.reset(id_token)
            scope.pop(WRITE, None)  # Its function refers to the scope: a reference cycle.

    def _answer(
        self, scope: Scope, headers: Headers, origin: str | None, allows: bool
    ) -> Response | None:
        """Return a refusal or the answer to a CORS preflight; None: the request goes on."""
        method, path = scope["method"], scope["path"]
        host = headers.get("host", "")
        if self._guards and not self._knows(host):
            return _refusal(
                path,
                421,
                f"The host {host[:100]!r} is not allowed, and this server has no API keys."
                " Add it to gateway.allowed_hosts, or set API keys.",
                "unknown_host",
            )
        if (
            origin is not None
            and not allows
            and (self._guards or method == "OPTIONS")
            and not _same(origin, host)
        ):
            return _refusal(
                path,
                403,
                f"Pages of {origin[:100]!r} may not use this server; add it to"
                " gateway.cors_origins.",
                "origin_not_allowed",
            )
        if method != "OPTIONS" or not headers.get("access-control-request-method"):
            return None
        wanted = headers.get("access-control-request-headers", "")
        names = (
            wanted
            if _HEADER_NAMES.fullmatch(wanted)
            else "Authorization, X-Api-Key, Content-Type, X-Request-Id"
        )
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": names,
                "Access-Control-Max-Age": "600",
            },
        )

    def refusal(self, host: str, origin: str | None) -> str | None:
        """Return why a request with this Host and Origin is refused, or None. For an application
        that serves only its own pages.
        """
        if self._guards and not self._knows(host):
            return f"{host[:100]!r} is not an allowed host; add it to gateway.allowed_hosts."
        if origin is not None and not _same(origin, host):
            return f"Pages of {origin[:100]!r} may not use this server."
        return None

    def _allows(self, origin: str) -> bool:
        """Return True if a browser may show this server's answers to a page of `origin`."""
        if {"*", origin} & {*self._settings.cors_origins}:
            return True
        return self._guards and self._is_local and is_loopback(_origin(origin).hostname or "")

    def _knows(self, host: str) -> bool:
        """Return True if the Host header names this server. DNS rebinding needs a name that a
        page's owner controls, so a server that listens on a network also accepts any IP address.
        """
        name = host_name(host)
        if is_loopback(name) or name in self._hosts:
            return True
        return not self._is_local and _is_address(name)

    def _log(self, scope: Scope, seen: AccessRecord, taken_ms: float) -> None:
        level = logging.DEBUG if scope["path"] in _POLLED and seen.status == 200 else logging.INFO
        if self._settings.access_log == OFF or not access.isEnabledFor(level):
            return
        path = "".join(char if "!" <= char <= "~" else "?" for char in scope["path"][:200])
        known = {
            "method": scope["method"][:16],
            "path": path,
            "status": seen.status or 500,
            "ms": round(taken_ms, 1),
            "tokens": seen.num_tokens,
            "tenant": seen.tenant,
        }
        text = "%(method)s %(path)s %(status)d %(ms).1f ms %(tokens)d tokens, tenant %(tenant)s"
        access.log(level, text, known, extra=fields(**known, reply_id=seen.reply_id))


def host_name(host: str) -> str:
    """Return the name in a Host header without its port: "::1" for "[::1]:8000"."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def is_loopback(name: str) -> bool:
    """Return True if a name or address can only mean this machine, independent of DNS."""
    return is_near(name) or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same(origin: str, host: str) -> bool:
    return _origin(origin).netloc.lower() == host.lower()


def _origin(text: str) -> urllib.parse.SplitResult:
    """Return the parts of an origin; empty parts if it cannot be parsed."""
    try:
        return urllib.parse.urlsplit(text)
    except ValueError:
        return urllib.parse.urlsplit("")


def _refusal(path: str, status: int, message: str, code: str) -> Response:
    error = ApiError(status, message, code=code)
    return Response(error.body_at(path), status, media_type="application/json")

"""What holds for every request, whatever it asks for: its id, who may ask from where, and its line
in the access log.

A page in a browser can make its own name point at this server and then read it, if the server asks for
no key (DNS rebinding). So a server without keys answers only to names of this machine, to addresses if
it serves a network, and to names in its deployment; and only to pages of its own, of this machine if it
serves this one alone, and those that its deployment names. Knows ASGI, nothing of routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import ipaddress
import logging
import re
import socket
import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hadal.core.balance import OFF
from hadal.core.config import GatewayConfig
from hadal.core.handshake import is_near
from hadal.gateway.descriptors import ConnectionLimit
from hadal.gateway.errors import ApiError, is_anthropics, overloaded
from hadal.runtime.process.logs import REQUEST_ID, fields

# One TCP connection: uvicorn's protocol, with limits on headers and on clients that stand still.
#
# uvicorn waits for ever for the end of the headers, takes any number of them, behind a body too, and
# loses the body of a request that offers another protocol (`Upgrade: h2c`, as `curl --http2` sends
# it). So a request's head is gathered here first and handed on without such an offer, which a server
# may ignore (RFC 9110, 7.8). A client that does not read is cut off by the kernel; the reply's own
# deadline has ended its generation before.


HEADERS_S = 15.0
"""Time from a connection's or a request's first byte to the end of its headers; and from an answer to
the end of a request that came slower than it.
"""
MAX_HEADER_BYTES = 64 * 1024
FULL_RETRY_S = 2.0
"""Time after which a connection refused for want of descriptors may be tried again."""
UNREAD_S = 60.0
"""Data that the client has not taken for so long ends the connection."""
WRITE = "hadal.write"
"""Key of a scope for its connection's streams.Write; removed when the request is answered."""
_OFFER = re.compile(rb"(?<=\r\n)(?:upgrade|http2-settings)[ \t]*:[^\r\n]*\r\n", re.IGNORECASE)
_STARTS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n")
"""What a request may begin with; other bytes are refused at once, not when their head is
complete.
"""


class _UntilClosed(int):
    """Length of a body that ends with its connection: nothing is longer, and nothing too short."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilClosed:
        return self


class GatewayProtocol(HttpToolsProtocol):
    """The protocol of one connection, which uvicorn makes."""

    connection_limit: ConnectionLimit | None = None
    """Limit of open connections, which a subclass sets; None: no limit."""
    _header_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    """Of a head, or since the last of a body: what frames it, and what follows it."""
    _in_headers = False
    _head: bytearray | None = None
    """What came of a request's head so far; None while the parser reads a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        limit = self.connection_limit
        if connection is not None and limit and not limit.admits(connection.fileno()):
            self._refuse(
                overloaded(
                    503,
                    "The server has no descriptors left for more connections; try again.",
                    FULL_RETRY_S,
                    "too_many_connections",
                )
            )
            return
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # A Unix socket has none.
                connection.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000)
                )
        self._head = bytearray()
        self._begin_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        self._end_rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            self._feed(data)
            return
        if not self._head:  # Line ends behind a body begin no request (RFC 9112, 2.2).
            data = data.lstrip(b"\r\n")
            if not data:
                return
        self._unset_keepalive_if_required()
        head = self._head
        if not self._in_headers:
            self._begin_headers()
        searched = max(0, len(head) - 3)
        head += data
        if head[0] in _STARTS:
            end = head.find(b"\r\n\r\n", searched)
            if end < 0 and len(head) <= MAX_HEADER_BYTES:
                return
            if end > MAX_HEADER_BYTES or end < 0:
                self._refuse_headers()
                return
            data = _OFFER.sub(b"", bytes(head[: end + 2])) + bytes(head[end + 2 :])
        else:
            data = bytes(head)
        self._head = None
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._num_header_bytes += len(data)
        super().data_received(data)
        # Of a request that came right behind another's body the parser gathers the head; and it takes
        # trailers, and what stands between the chunks of a body.
        if self._head is None and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # Nobody looks at trailers.
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = None
        self._begin_headers()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:  # The answer's task has not run yet.
            scope: Scope = self.scope  # type: ignore[assignment]
            scope[WRITE] = functools.partial(self._write, self.cycle)
            # Clients of HTTP/1.0 know no chunks, and their connections are closed behind the answer
            # (RFC 9112, 6.1 and 6.3).
            if self.scope["http_version"] == "1.0":
                self.cycle.chunked_encoding = False
                self.cycle.expected_content_length = _UntilClosed()
        self._end_headers()

    def _write(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Write a part of the body of an answer that has begun, as the cycle itself would."""
        if cycle.disconnected or self.flow.write_paused or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def on_message_complete(self) -> None:
        self._end_rest()
        super().on_message_complete()
        self._head = bytearray()
        if self.cycle.response_complete:  # It was answered before it had come.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        is_early = self._head is None and not self._in_headers and self.cycle.response_complete
        if is_early and self._rest_timer is None:
            self._rest_timer = self.loop.call_later(HEADERS_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets a refusal in the same shape as any other."""
        self._refuse(ApiError(400, msg))

    def _begin_headers(self) -> None:
        self._in_headers = True
        self._num_header_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADERS_S, self._headers_late)

    def _end_headers(self) -> None:
        self._in_headers = False
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_rest(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The next request begins while this one is answered, which does not suffer for it.
            self._header_timer = self.loop.call_later(HEADERS_S, self._headers_late)
        elif self._in_headers:
            self._refuse(ApiError(408, f"The headers were not complete after {HEADERS_S:g} s."))

    def _refuse_headers(self) -> None:
        self._refuse(ApiError(431, f"The headers are longer than {MAX_HEADER_BYTES} bytes."))

    def _refuse(self, error: ApiError) -> None:
        cycle = self.cycle
        is_answered = bool(self.pipeline) or (
            cycle is not None
            and (not cycle.response_complete if self._in_headers else cycle.response_started)
        )
        self._end_headers()
        if self.transport.is_closing():
            return
        if is_answered:  # Nothing may be written into that answer, or behind it.
            self.transport.close()
            return
        body = error.body
        head = [
            f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
            "Content-Type: application/json",
            *(f"{name}: {value}" for name, value in error.headers.items()),
            f"Content-Length: {len(body)}",
            "Connection: close",
            f"X-Request-Id: {uuid.uuid4().hex}",
            "",
            "",
        ]
        self.transport.write("\r\n".join(head).encode() + body)
        self.transport.close()


access = logging.getLogger("hadal.access")

SEEN = "hadal.seen"
"""Key of a scope under which its AccessRecord lies."""
_EXPOSED = b"X-Request-Id, Retry-After" + b"".join(
    b", X-RateLimit-%s-%s" % (what, of)
    for of in (b"Requests", b"Tokens")
    for what in (b"Limit", b"Remaining", b"Reset")
)
METHODS = "GET, POST, DELETE, OPTIONS"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$&'*+.^_`|~, -]{1,1024}")
_POLLED = ("/health", "/metrics", "/status")
"""Asked for every few seconds by machines: a line for those only if something is wrong, or in the
debug log.
"""


@dataclass
class AccessRecord:
    """What becomes known of a request while it is worked on, for its line in the access log."""

    request_id: str
    status: int = 0
    num_tokens: int = 0
    tenant: str = "-"
    reply_id: str = ""
    """The `id` in the answer's body."""


class Edge:
    """The outermost layer of the application."""

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewayConfig,
        host: str,
        *,
        has_keys: bool,
        now: Callable[[], float],
    ) -> None:
        """`host`: the address that is listened at; "" leaves names and origins unchecked."""
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
            extra.append((b"request-id", seen.request_id.encode()))  # What its clients look for.
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
            scope.pop(WRITE, None)  # It refers to what refers to the scope.

    def _answer(
        self, scope: Scope, headers: Headers, origin: str | None, allows: bool
    ) -> Response | None:
        """A refusal, or what browsers ask before they ask; None: the request goes on."""
        method, path = scope["method"], scope["path"]
        host = headers.get("host", "")
        if self._guards and not self._knows(host):
            return _refusal(
                path,
                421,
                "This server has no API keys and answers only to names that it knows;"
                f" {host[:100]!r} is none. Name it in gateway.allowed_hosts, or set API keys.",
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
                f"Pages of {origin[:100]!r} may not ask this server; name it in"
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
        """Why whoever asks by this name, from a page of this origin, is turned away; None: he is
        not. For an application that answers its own pages alone.
        """
        if self._guards and not self._knows(host):
            return f"{host[:100]!r} is no name of this machine; name it in gateway.allowed_hosts."
        if origin is not None and not _same(origin, host):
            return f"Pages of {origin[:100]!r} may not ask this server."
        return None

    def _allows(self, origin: str) -> bool:
        """Whether a browser may show this server's answers to a page of `origin`."""
        if {"*", origin} & {*self._settings.cors_origins}:
            return True
        return self._guards and self._is_local and is_loopback(_origin(origin).hostname or "")

    def _knows(self, host: str) -> bool:
        """Whether the server has this name. No page can give its own name to an address, as it can to
        another name (DNS rebinding), so a server for the network also has any address.
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
    """The name in a Host header, without its port: "[::1]:8000" is "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def is_loopback(name: str) -> bool:
    """Whether a name or address can only mean this machine: no other's DNS has a say in it."""
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
    """Its parts; of what is none, no parts."""
    try:
        return urllib.parse.urlsplit(text)
    except ValueError:
        return urllib.parse.urlsplit("")


def _refusal(path: str, status: int, message: str, code: str) -> Response:
    error = ApiError(status, message, code=code)
    return Response(error.body_at(path), status, media_type="application/json")

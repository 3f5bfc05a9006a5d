"""One TCP connection: uvicorn's protocol, with limits on headers and on clients that stall.

uvicorn waits without a limit for the end of the headers and accepts any number of headers and
trailers. It also loses the body of a request that offers another protocol (`Upgrade: h2c`, which
`curl --http2` sends). So this protocol first collects a request's head, then removes such an offer,
which a server may ignore (RFC 9110, 7.8), and passes the head on. If a client does not read, the
reply's send deadline ends its generation, and the kernel later ends the connection (UNREAD_S).
Independent of routes and tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import re
import socket
import uuid

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hadal.gateway.edge.descriptors import ConnectionLimit
from hadal.gateway.edge.errors import ApiError, overloaded

HEADERS_S = 15.0
"""Maximum time from the start of a connection or request to the end of the headers. Also the
maximum time in which the rest of an already answered request must arrive.
"""
MAX_HEADER_BYTES = 64 * 1024
FULL_RETRY_S = 2.0
"""Time after which a client may retry a connection refused for want of descriptors."""
UNREAD_S = 60.0
"""Time after which a connection ends if the client does not acknowledge the data sent to it."""
WRITE = "hadal.write"
"""Scope key of the connection's streams.Write; removed when the request is answered."""
_OFFER = re.compile(rb"(?<=\r\n)(?:upgrade|http2-settings)[ \t]*:[^\r\n]*\r\n", re.IGNORECASE)
_STARTS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n")
"""Bytes that may begin a request; others are refused at once, before the head is complete."""


class _UntilClosed(int):
    """Length of a body that ends with its connection: uvicorn's checks for too many and for too few
    bytes both pass.
    """

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilClosed:
        return self


class GatewayProtocol(HttpToolsProtocol):
    """Protocol object of one connection; uvicorn creates it."""

    connection_limit: ConnectionLimit | None = None
    """Limit of open connections, set by a subclass; None: no limit."""
    _header_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    """Bytes of the current head, or bytes since the last body data: chunk framing and trailers."""
    _in_headers = False
    _head: bytearray | None = None
    """Bytes of the request's head received so far; None while the parser reads a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        limit = self.connection_limit
        if connection is not None and limit and not limit.admits(connection.fileno()):
            self._refuse(
                overloaded(
                    503,
                    "The server has reached its limit of open connections; try again.",
                    FULL_RETRY_S,
                    "too_many_connections",
                )
            )
            return
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # Unix sockets do not support this option.
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
        if not self._head:  # Line ends after a body do not begin a request (RFC 9112, 2.2).
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
        # Heads of pipelined requests, trailers and chunk framing reach the parser without `_head`.
        if self._head is None and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # Trailers are ignored.
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
        if self.cycle is not None:  # Its task has not run yet, so the scope can still change.
            scope: Scope = self.scope  # type: ignore[assignment]
            scope[WRITE] = functools.partial(self._write, self.cycle)
            # HTTP/1.0 clients do not support chunks; their connection is closed after the answer
            # (RFC 9112, 6.1 and 6.3).
            if self.scope["http_version"] == "1.0":
                self.cycle.chunked_encoding = False
                self.cycle.expected_content_length = _UntilClosed()
        self._end_headers()

    def _write(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Write a part of the body of an answer that has begun, as the cycle itself would. Return
        False, with nothing written, if the connection cannot take a chunk now.
        """
        if cycle.disconnected or self.flow.write_paused or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def on_message_complete(self) -> None:
        self._end_rest()
        super().on_message_complete()
        self._head = bytearray()
        if self.cycle.response_complete:  # The answer was complete before the request was.
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
        """Refuse input that is not HTTP, with an error in the usual shape."""
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
            # A pipelined request began during another's answer, which must not be cut off.
            self._header_timer = self.loop.call_later(HEADERS_S, self._headers_late)
        elif self._in_headers:
            self._refuse(
                ApiError(
                    408, f"The headers were not complete after {HEADERS_S:g} s; send them faster."
                )
            )

    def _refuse_headers(self) -> None:
        self._refuse(
            ApiError(431, f"The headers are longer than {MAX_HEADER_BYTES} bytes; shorten them.")
        )

    def _refuse(self, error: ApiError) -> None:
        cycle = self.cycle
        is_answered = bool(self.pipeline) or (
            cycle is not None
            and (not cycle.response_complete if self._in_headers else cycle.response_started)
        )
        self._end_headers()
        if self.transport.is_closing():
            return
        if is_answered:  # Bytes written now would land inside that answer or after it.
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

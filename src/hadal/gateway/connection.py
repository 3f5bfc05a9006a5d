"""One TCP connection: uvicorn's protocol, with limits on headers and on clients that stand still.

uvicorn waits for ever for the end of the headers, takes any number of them, and loses the body of a
request that offers another protocol (`Upgrade: h2c`, as `curl --http2` sends it). So a request's
head is gathered here first and handed on without such an offer, which a server may ignore (RFC
9110, 7.8). A client that does not read is cut off by the kernel; the reply's own deadline has ended
its generation before.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import re
import socket
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hadal.gateway.errors import ApiError

HEADERS_S = 15.0
"""From a connection's or a request's first byte to the end of its headers."""
MAX_HEADER_BYTES = 64 * 1024
UNREAD_S = 60.0
"""Data that the client has not taken for so long ends the connection."""
_OFFER = re.compile(rb"(?<=\r\n)(?:upgrade|http2-settings)[ \t]*:[^\r\n]*\r\n", re.IGNORECASE)
_STARTS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n")
"""What a request may begin with; other bytes are refused at once, not when their head is
complete.
"""


class GatewayProtocol(HttpToolsProtocol):
    """Created by uvicorn for every connection."""

    _header_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _in_headers = False
    _head: bytearray | None = None
    """What came of a request's head so far; None while the parser reads a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # A Unix socket has none.
                connection.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000)
                )
        self._head = bytearray()
        self._begin_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            self._feed(data)
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
        if self._in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        # A request that came right behind another's body: its head is the parser's to gather.
        if self._in_headers and self._head is None and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = None
        self._begin_headers()

    def on_headers_complete(self) -> None:
        self._end_headers()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head = bytearray()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets a refusal in the same shape as any other."""
        self._refuse(400, msg)

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

    def _headers_late(self) -> None:
        self._header_timer = None
        if self._in_headers:
            self._refuse(408, f"The headers were not complete after {HEADERS_S:g} s.")

    def _refuse_headers(self) -> None:
        self._refuse(431, f"The headers are longer than {MAX_HEADER_BYTES} bytes.")

    def _refuse(self, status: int, message: str) -> None:
        self._end_headers()
        if self.transport.is_closing():
            return
        body = ApiError(status, message).body
        head: list[Any] = [
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
            "Content-Type: application/json",
        ]
        head += [
            f"Content-Length: {len(body)}",
            "Connection: close",
            f"X-Request-Id: {uuid.uuid4().hex}",
            "",
            "",
        ]
        self.transport.write("\r\n".join(head).encode() + body)
        self.transport.close()

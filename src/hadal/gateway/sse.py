"""Send one reply, streamed or whole, while its generations run.

A stream's first bytes wait for the first token or the first keep-alive, so that a refusal by the
front still gets a status of its own; from then on errors are events of the stream. Knows ASGI's
send; makes no JSON.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Send

from hadal.core.seams import Deliver
from hadal.gateway.errors import ApiError, retry_after, sentence
from hadal.gateway.far_host import FarHost
from hadal.gateway.host import Host
from hadal.gateway.mailbox import Mailbox
from hadal.gateway.replies import DONE, KEEP_ALIVE, Outcome, ReplyFormat, Usage
from hadal.gateway.service import Work
from hadal.gateway.stream import Piece

log = logging.getLogger("hadal.gateway")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the chunks of a stream.
]
_WAIT_S = 60.0
_GRACE_S = 5.0
"""The front ends a request that is late; this is how much later it is ended without the front."""
_CODES = {
    400: "context_length_exceeded",
    429: "overloaded",
    500: "engine_error",
    503: "overloaded",
    504: "request_timeout",
}


@dataclass
class Times:
    """When things happened to a request, in the clock's seconds."""

    start_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0
    is_read: bool = False
    """Its body became generations, which the front has."""


@dataclass
class Meter:
    """What one choice's deliveries said besides text."""

    num_cached: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None


class ClientGone(Exception):
    """The client closed the connection, or does not read: there is nobody to answer."""


class Reply:
    """The running choices of one HTTP request."""

    def __init__(
        self,
        work: Work,
        mailbox: Mailbox,
        host: Host | FarHost,
        reply_format: ReplyFormat,
        times: Times,
        now: Callable[[], float],
        *,
        timeout_s: float,
        keep_alive_s: float,
        send_timeout_s: float,
    ) -> None:
        self.times = times
        self._work = work
        self._mailbox = mailbox
        self._host = host
        self._format = reply_format
        self._now = now
        self._deadline_s = times.start_s + timeout_s + _GRACE_S
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s
        self._num_open = len(work.choices)
        self.meters = [Meter() for _ in work.choices]
        """Of each choice."""

    @property
    def usage(self) -> Usage:
        """Counted so far."""
        assemblers = [choice.assembler for choice in self._work.choices]
        return Usage(
            self._work.num_prompt_tokens,
            sum(assembler.num_tokens for assembler in assemblers),
            sum(assembler.num_reasoning_tokens for assembler in assemblers),
            # Choices stand together by prompt. A prompt counts once, so what its first choice found
            # is what counts.
            sum(meter.num_cached for meter in self.meters[:: self._work.ask.n]),
        )

    async def send_whole(self, send: Send) -> int:
        """Wait for every choice, then send one JSON body; returns the status. Raises ApiError,
        ClientGone.
        """
        pieces = [Piece() for _ in self._work.choices]
        while self._num_open:
            for index, deliver in await self._take(_WAIT_S):
                pieces[index].add(self._assemble(index, deliver))
        outcomes = [
            Outcome(index, piece, choice.assembler.num_reasoning_tokens > 0, choice.prefix)
            for index, (choice, piece) in enumerate(zip(self._work.choices, pieces, strict=True))
        ]
        body = self._format.whole(outcomes, self.usage)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, body, more=False)
        return 200

    async def send_stream(self, send: Send) -> int:
        """Send events as tokens come; returns 200, or the status of an error told in the stream.

        Raises ApiError (before the first byte only), ClientGone.
        """
        deliveries = await self._take(self._keep_alive_s)
        # An error in the first delivery gets a status of its own.
        for _, deliver in deliveries:
            self._raise_error(deliver)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        if not deliveries:
            await self._send(send, KEEP_ALIVE)
        opening = b"".join(
            self._format.opening(i, choice.prefix) for i, choice in enumerate(self._work.choices)
        )
        try:
            data = opening + self._events(deliveries)
            while self._num_open:
                if data:
                    await self._send(send, data)
                deliveries = await self._take(self._keep_alive_s)
                data = self._events(deliveries) if deliveries else KEEP_ALIVE
            if self._work.ask.include_usage:
                data += self._format.usage(self.usage)
            await self._send(send, data + DONE, more=False)
        except ApiError as error:
            await self._send(send, b"data: " + error.body + b"\n\n", more=False)
            return error.status
        return 200

    def _events(self, deliveries: list[tuple[int, Deliver]]) -> bytes:
        """One write for all that is ready: the tokens of a choice that came together share an
        event.
        """
        if len(deliveries) == 1:
            index, deliver = deliveries[0]
            return self._format.chunks(index, self._assemble(index, deliver))
        pieces: dict[int, Piece] = {}
        for index, deliver in deliveries:
            piece = self._assemble(index, deliver)
            if index in pieces:
                pieces[index].add(piece)
            else:
                pieces[index] = piece
        return b"".join(self._format.chunks(index, piece) for index, piece in pieces.items())

    def _assemble(self, index: int, deliver: Deliver) -> Piece:
        self._raise_error(deliver)
        choice = self._work.choices[index]
        assembler = choice.assembler
        if assembler.finish is not None:
            return Piece()
        meter = self.meters[index]
        meter.num_cached += deliver.num_cached
        if deliver.tokens:
            self.times.last_token_s = meter.last_token_s = self._now()
            if meter.first_token_s is None:
                meter.first_token_s = meter.last_token_s
                self.times.first_token_s = self.times.first_token_s or meter.first_token_s
        piece = assembler.push(deliver.tokens)
        if piece.finish is None and deliver.final:
            piece.add(assembler.end("length"))
        if piece.finish is not None:
            self._num_open -= 1
            if assembler.period:
                log.info(
                    "the reply repeats %d tokens without end and is stopped after %d",
                    assembler.period,
                    assembler.num_tokens,
                )
            if (
                not deliver.final
            ):  # A stop string, or a text in circles: the engine does not know of it.
                self._host.cancel(self._mailbox, choice.generation.request_id)
        return piece

    def _raise_error(self, deliver: Deliver) -> None:
        if deliver.error is not None:
            raise ApiError(
                deliver.error_status,
                sentence(deliver.error),
                code=_CODES.get(deliver.error_status),
                headers=retry_after(deliver.retry_after_s),
            )

    async def _take(self, timeout_s: float) -> list[tuple[int, Deliver]]:
        now_s = self._now()
        if now_s >= self._deadline_s:
            raise ApiError(
                504, f"The request took longer than {self._timeout_s:g} s.", code="request_timeout"
            )
        deliveries = await self._mailbox.take(min(timeout_s, self._deadline_s - now_s))
        if self._mailbox.gone:
            raise ClientGone("the client closed the connection")
        return deliveries

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Hand bytes to the server, which waits while its buffer is full: a client that does not
        read is left.
        """
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGone("the client does not read") from None
        # After the last byte the server reports the end of the connection in the same way; that is
        # no failure.
        if more and self._mailbox.gone:
            raise ClientGone("the client closed the connection")

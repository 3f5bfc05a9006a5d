"""Send one reply, streamed or whole, while its generations run.

    send_whole     deliveries ──► pieces ──► one body
    send_stream    first ──► head ──► pieces, an event each ──► end
                     pieces of a running stream go straight to its connection (gateway/edge/streams)

A stream's first bytes wait for the first token or the first keep-alive, so that a refusal by the
front still gets its own status. Later errors are events of the stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Message, Send

from hadal.core.messages.generation import Deliver, RateLimits
from hadal.gateway.api.reply import Outcome, ReplyFormat, Usage
from hadal.gateway.api.shapes import CacheExplanation
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.desk.mailbox import Mailbox
from hadal.gateway.desk.service import Choice, Work
from hadal.gateway.edge.errors import ApiError, limit_headers, retry_after, sentence
from hadal.gateway.edge.intake import Patience
from hadal.gateway.edge.streams import Outlet
from hadal.gateway.text.piece import Piece
from hadal.runtime.process.logs import fields

log = logging.getLogger("hadal.gateway")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # Stops nginx from buffering the stream.
]
_LEFT = "the client closed the connection"
_WAIT_S = 60.0
_GRACE_S = 5.0
"""Extra time for the front after its own deadline; then the gateway itself ends the reply."""
_CODES = {
    400: "context_length_exceeded",
    429: "overloaded",
    500: "engine_error",
    503: "overloaded",
    504: "request_timeout",
}


@dataclass
class Times:
    """Times of one request's events, in the clock's seconds."""

    start_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0
    is_read: bool = False
    """True once the request's body became generations and these were submitted to the front."""


@dataclass
class Meter:
    """Measurements of one choice's deliveries, besides text.

    Tokens of one delivery arrive together, and prefill delivers the first one alone. So the mean
    time between tokens is (last - first) / (tokens - 1), for steps of any size.
    """

    num_cached: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None


class ClientGone(Exception):
    """Raised if the client closed the connection or does not read."""


async def send_within(timeout_s: float, send: Send, message: Message) -> None:
    """Pass a message to the server, which waits while its buffer is full. Raises ClientGone."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except TimeoutError:
        raise ClientGone("the client does not read the reply") from None


class Reply:
    """Running choices of one HTTP request."""

    def __init__(
        self,
        work: Work,
        mailbox: Mailbox,
        link: FrontLink,
        reply_format: ReplyFormat,
        times: Times,
        now: Callable[[], float],
        timeout_s: float,
        patience: Patience,
    ) -> None:
        """`timeout_s`: longest wait for a delivery."""
        self.times = times
        self.work = work
        self.mailbox = mailbox
        self._link = link
        self._format = reply_format
        self._now = now
        self._timeout_s = timeout_s
        self._deadline_s = times.start_s + timeout_s + _GRACE_S
        """Time at which the reply fails, unless a delivery arrives before."""
        self._patience = patience
        self._num_open = len(work.choices)
        self.meters = [Meter() for _ in work.choices]
        """One meter per choice."""
        self._limits: RateLimits | None = None

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        assemblers = [choice.assembler for choice in self.work.choices]
        return Usage(
            self.work.num_prompt_tokens,
            sum(assembler.num_tokens for assembler in assemblers),
            sum(assembler.num_reasoning_tokens for assembler in assemblers),
            # Choices are grouped by prompt; only its first choice counts a prompt's cached tokens.
            sum(meter.num_cached for meter in self.meters[:: self.work.ask.n]),
            self._explanations() if self.work.ask.explains_cache else (),
        )

    def _explanations(self) -> tuple[CacheExplanation, ...]:
        """Return the explanations of prompts with a first token."""
        traces = (choice.trace for choice in self.work.choices)
        found = (trace.explanation for trace in traces if trace is not None)
        return tuple(each for each in found if each is not None)

    async def send_whole(self, send: Send) -> int:
        """Wait for all choices; send one JSON body. Return 200. Raises ApiError, ClientGone."""
        pieces = [Piece() for _ in self.work.choices]
        while self._num_open:
            for index, deliver in await self._take(_WAIT_S):
                pieces[index].add(self._assemble(index, deliver))
        outcomes = [
            Outcome(
                index,
                piece,
                choice.assembler.num_reasoning_tokens > 0,
                choice.prefix,
                self._prompt_ids(choice),
            )
            for index, (choice, piece) in enumerate(zip(self.work.choices, pieces, strict=True))
        ]
        body = self._format.whole(outcomes, self.usage)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._limit_headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, body, more=False)
        return 200

    async def send_stream(self, send: Send, outlet: Outlet) -> int:
        """Send events as tokens arrive. Return 200, or the status of an error sent in the stream.
        `outlet` writes the events between the first and the last, as far as it can. Raises ApiError
        (before the first byte only), ClientGone.
        """
        deliveries = await self._take(self._patience.keep_alive_s)
        # An error in the first delivery still gets its own HTTP status.
        for _, deliver in deliveries:
            self._raise_error(deliver)
        headers = [*_STREAM_HEADERS, *self._limit_headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if not deliveries:
            await self._send(send, self._format.keep_alive)
        try:
            pieces = self._pieces(deliveries)  # Before `begin`: sets the number of cached tokens.
            data = self._format.begin(self.usage)
            data += b"".join(
                self._format.opening(i, choice.prefix, self._prompt_ids(choice))
                for i, choice in enumerate(self.work.choices)
            )
            data += self._chunks(pieces)
            while self._num_open:
                if data:
                    await self._send(send, data)
                data = await self._run(outlet)
            await self._send(send, data + self._format.end(self.usage), more=False)
        except ApiError as error:
            await self._send(send, self._format.failure(error), more=False)
            return error.status
        return 200

    async def _run(self, outlet: Outlet) -> bytes:
        """Write events without this task as long as possible. Return the event that the task must
        write: the last one, one that `outlet` did not write, or a keep-alive. Raises ApiError,
        ClientGone.
        """
        running = _RunningStream(self, outlet)
        self.mailbox.listener = lambda: outlet.streams.ready(running)
        outlet.streams.join(running)
        try:
            running.push()
            return await running.rest
        finally:
            self.mailbox.listener = None
            outlet.streams.leave(running)

    def quiet_until_s(self) -> float:
        """Return the time at which the stream is late if nothing arrives before."""
        return min(self._now() + self._patience.keep_alive_s, self._deadline_s)

    def arrived(self) -> tuple[bytes, bool] | None:
        """Return the events of all arrived deliveries, and True if the last is among them. Return
        None if nothing new arrived. Raises ApiError, ClientGone.
        """
        news = self._news(self._received(self.mailbox.take_now()))
        return (self._chunks(self._pieces(news)), not self._num_open) if news else None

    def quiet(self) -> bytes:
        """Return a keep-alive for a stream without news. Raises ApiError 504 after the deadline."""
        self._check_deadline()
        return self._format.keep_alive

    def _chunks(self, pieces: dict[int, Piece]) -> bytes:
        """Return the events of all pieces, joined for a single write."""
        usage = self.usage if self.work.ask.has_usage_so_far else None
        return b"".join(self._format.chunks(index, piece, usage) for index, piece in pieces.items())

    def _prompt_ids(self, choice: Choice) -> tuple[int, ...]:
        return choice.generation.prompt if self.work.ask.return_token_ids else ()

    def _pieces(self, deliveries: list[tuple[int, Deliver]]) -> dict[int, Piece]:
        """Return one piece per choice: tokens of a choice that arrived together share an event."""
        pieces: dict[int, Piece] = {}
        for index, deliver in deliveries:
            piece = self._assemble(index, deliver)
            if index in pieces:
                pieces[index].add(piece)
            else:
                pieces[index] = piece
        return pieces

    def _assemble(self, index: int, deliver: Deliver) -> Piece:
        self._raise_error(deliver)
        choice = self.work.choices[index]
        assembler = choice.assembler
        if assembler.finish is not None:
            return Piece()
        meter = self.meters[index]
        meter.num_cached += deliver.num_cached
        is_first = bool(deliver.tokens) and meter.first_token_s is None
        if deliver.tokens:
            self.times.last_token_s = meter.last_token_s = self._now()
            if meter.first_token_s is None:
                meter.first_token_s = meter.last_token_s
                self.times.first_token_s = self.times.first_token_s or meter.first_token_s
                if choice.trace is not None:
                    choice.trace.computed(deliver.num_cached, deliver.sources, self.times.start_s)
        piece = assembler.push(() if choice.is_prompt_only else deliver.tokens)
        if choice.scored is not None and is_first:
            piece.prompt = dataclasses.replace(choice.scored, scores=deliver.scores)
        if piece.finish is None and deliver.final:
            piece.add(assembler.end("length"))
        if piece.finish is not None:
            self._num_open -= 1
            if assembler.period:
                log.info(
                    "the reply repeats %d tokens without end and is stopped after %d",
                    assembler.period,
                    assembler.num_tokens,
                    extra=fields(request_id=self.mailbox.log_id),
                )
            if (
                not deliver.final
            ):  # A stop string or a repetition: the engine goes on until cancelled.
                self._link.cancel(self.mailbox, choice.generation.request_id)
        return piece

    def _raise_error(self, deliver: Deliver) -> None:
        if deliver.error is not None:
            raise ApiError(
                deliver.error_status,
                sentence(deliver.error),
                code=deliver.error_code or _CODES.get(deliver.error_status),
                headers={**retry_after(deliver.retry_after_s), **limit_headers(deliver.limits)},
            )

    def _limit_headers(self) -> list[tuple[bytes, bytes]]:
        headers = limit_headers(self._limits)
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    async def _take(self, timeout_s: float) -> list[tuple[int, Deliver]]:
        """Return new deliveries; empty after `timeout_s`. A delivery with nothing but a tenant's
        rate limits, sent at its admission, does not count.
        """
        until_s = self._now() + timeout_s
        while True:
            deliveries = await self._take_any(max(0.0, until_s - self._now()))
            news = self._news(deliveries)
            if news or not deliveries:
                return news

    def _news(self, deliveries: list[tuple[int, Deliver]]) -> list[tuple[int, Deliver]]:
        for _, deliver in deliveries:
            self._limits = deliver.limits or self._limits
        return [(i, one) for i, one in deliveries if one.final or one.tokens or not one.limits]

    async def _take_any(self, timeout_s: float) -> list[tuple[int, Deliver]]:
        self._check_deadline()
        left_s = max(0.0, self._deadline_s - self._now())
        return self._received(await self.mailbox.take(min(timeout_s, left_s)))

    def _received(self, deliveries: list[tuple[int, Deliver]]) -> list[tuple[int, Deliver]]:
        """Postpone the deadline if deliveries arrived, and return them. Raises ClientGone."""
        if deliveries:
            self._deadline_s = self._now() + self._timeout_s + _GRACE_S
        if self.mailbox.gone:
            raise ClientGone(_LEFT)
        return deliveries

    def _check_deadline(self) -> None:
        if self._now() >= self._deadline_s:
            text = f"The request received no token within {self._timeout_s:g} s; try again."
            raise ApiError(504, text, code="request_timeout")

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body. Raises ClientGone if the client does not read."""
        message = {"type": "http.response.body", "body": data, "more_body": more}
        await send_within(self._patience.send_s, send, message)
        # After the last byte, `gone` may only mean that the connection ended normally.
        if more and self.mailbox.gone:
            raise ClientGone(_LEFT)


class _RunningStream:
    """Reply that writes to its connection itself, outside its request's asyncio task."""

    def __init__(self, reply: Reply, outlet: Outlet) -> None:
        self.rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """Bytes of the next event that the reply's task itself must write."""
        self.due_s = reply.quiet_until_s()
        self._reply = reply
        self._outlet = outlet

    def push(self) -> None:
        """Write the events that arrived."""
        if self.rest.done():
            return
        try:
            arrived = self._reply.arrived()
            if arrived is None:
                return
            data, is_last = arrived
            self.due_s = self._reply.quiet_until_s()
            if is_last or (data and not self._outlet.write(data)):
                self.rest.set_result(data)
        except Exception as error:  # The task raises it.
            self.rest.set_exception(error)

    def late(self) -> None:
        """Pass a keep-alive, or the error of a late reply, to the task."""
        if self.rest.done():
            return
        try:
            self.rest.set_result(self._reply.quiet())
        except ApiError as error:
            self.rest.set_exception(error)

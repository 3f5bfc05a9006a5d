"""An HTTP relay between an agent and a server, that keeps what both sent.

It passes on requests and replies part by part, with their headers, so that streams stream. It runs
in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h11

from hadal.core.errors import HadalError
from hadal.gateway.edge.codings import decoder_of

_READ_BYTES = 1 << 16


@dataclass
class Exchange:
    """One request and its reply."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    reply: bytes = b""

    @property
    def asked(self) -> dict[str, Any]:
        """Fields of the request; {} if its body is no JSON object."""
        with contextlib.suppress(HadalError, ValueError):
            decoder = decoder_of(self.headers.get("content-encoding", ""))
            pieces = [self.body] if decoder is None else decoder.pieces(self.body)
            fields = json.loads(b"".join(pieces))
            return fields if isinstance(fields, dict) else {}
        return {}

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of a streamed reply, or the whole of a reply that is one JSON object."""
        text = self.reply.decode(errors="replace")
        lines = [line[5:] for line in text.splitlines() if line.startswith("data:")] or [text]
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [each for each in found if isinstance(each, dict)]


@dataclass
class Relay:
    """A relay to a server's port."""

    server_port: int
    port: int = 0
    """Port on which agents connect."""
    exchanges: list[Exchange] = field(default_factory=list)
    """All exchanges, in the order of the requests' heads."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = contextlib.suppress(OSError, h11.ProtocolError, asyncio.CancelledError)
        with ends, contextlib.closing(writer):
            inner = await asyncio.open_connection("127.0.0.1", self.server_port)
            with contextlib.closing(inner[1]):
                agent = _Side(reader, writer, h11.SERVER)
                await self._exchange_all(agent, _Side(*inner, h11.CLIENT))

    async def _exchange_all(self, agent: _Side, server: _Side) -> None:
        while isinstance(request := await agent.next(), h11.Request):
            exchange = Exchange(
                request.method.decode(),
                request.target.decode(),
                {name.decode(): value.decode() for name, value in request.headers},
            )
            self.exchanges.append(exchange)
            await server.send(request)
            while not isinstance(event := await agent.next(), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    return
                exchange.body += event.data
                await server.send(event)
            await server.send(event)
            while not isinstance(event := await server.next(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    exchange.status = event.status_code
                elif isinstance(event, h11.Data):
                    exchange.reply += event.data
                else:
                    return
                await agent.send(event)
            await agent.send(event)
            if not (agent.is_open and server.is_open):
                return
            agent.state.start_next_cycle()
            server.state.start_next_cycle()

    @contextlib.contextmanager
    def running(self) -> Iterator[Relay]:
        """Relay within the block."""
        loop = asyncio.new_event_loop()
        listener = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = listener.sockets[0].getsockname()[1]
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


class _Side:
    """One of the two connections of an exchange."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, role: type[h11.Sentinel]
    ) -> None:
        self.state = h11.Connection(role, max_incomplete_event_size=1 << 20)
        self._reader = reader
        self._writer = writer

    @property
    def is_open(self) -> bool:
        """True if another request may follow on the connection."""
        return self.state.our_state is h11.DONE and self.state.their_state is h11.DONE

    async def next(self) -> Any:
        """Return the next event; a ConnectionClosed at the end."""
        while (event := self.state.next_event()) is h11.NEED_DATA:
            if self.state.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.state.receive_data(await self._reader.read(_READ_BYTES))
        return event

    async def send(self, event: Any) -> None:
        self._writer.write(self.state.send(event) or b"")
        await self._writer.drain()

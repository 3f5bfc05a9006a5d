"""Pages that gateways ask each other for, by path: facts of the front's process, another's counts.

Knows the wire's Query and QueryReply, and no single page. Used by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from hadal.core.errors import HadalError
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.gateways import Query, QueryReply
from hadal.gateway.desk.questions import Questions
from hadal.gateway.edge.errors import as_api_error

log = logging.getLogger("hadal.gateway")
Page = Callable[[Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""Answers a query with a status and a body. Raises HadalError."""
COUNTING = "/counting"
"""Page of the front's gateway: the refusal of a tenant's prompt to be counted, or null, as JSON."""


class Pages:
    """The pages of this process, by path in `table`, and the questions that it has asked others."""

    def __init__(self, name: str, send: Callable[[str, AnyMessage], None]) -> None:
        """`name`: this process's on the wire."""
        self.table: dict[str, Page] = {}
        self._name = name
        self._send = send
        self._asked = Questions[QueryReply]()
        self._answering: set[asyncio.Task[None]] = set()

    async def ask(
        self, whom: str, path: str, query: Mapping[str, str], timeout_s: float
    ) -> QueryReply | None:
        """Another process's page; None if it does not answer in time."""

        def send(name: str, reply_id: int) -> None:
            self._send(name, Query(self._name, reply_id, path, dict(query)))

        return (await self._asked.ask([whom], send, timeout_s)).get(whom)

    def give_up(self) -> None:
        """Whoever was asked is gone."""
        self._asked.give_up()

    def take(self, message: Query | QueryReply) -> None:
        """Answer a question, or hand an answer to who waits for it."""
        if isinstance(message, Query):
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            self._asked.take(message.gateway, message.reply_id, message)

    async def _answer(self, ask: Query) -> None:
        try:
            status, body = await self.table[ask.path](ask.query)
        except HadalError as error:
            refusal = as_api_error(error)
            status, body = refusal.status, refusal.body
        except Exception:
            log.exception("%s cannot be sent to %s", ask.path, ask.gateway)
            return
        self._send(ask.gateway, QueryReply(self._name, ask.reply_id, status, body))

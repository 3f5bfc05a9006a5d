"""Pages that gateways request from each other by path, such as facts of the front's process.

Depends on the wire's Query and QueryReply, not on any single page. Used by the event loop's thread.
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
"""Function that answers a query with a status and a body. Raises HadalError."""
COUNTING = "/counting"
"""Page of the front's gateway: as JSON, the refusal of counting a tenant's prompt, or null."""


class Pages:
    """Pages of this process by path (`table`), and its open questions to other processes."""

    def __init__(self, name: str, send: Callable[[str, AnyMessage], None]) -> None:
        """`name`: this process's name on the wire."""
        self.table: dict[str, Page] = {}
        self._name = name
        self._send = send
        self._asked = Questions[QueryReply]()
        self._answering: set[asyncio.Task[None]] = set()

    async def ask(
        self, whom: str, path: str, query: Mapping[str, str], timeout_s: float
    ) -> QueryReply | None:
        """Request another process's page; None if it does not answer in time."""

        def send(name: str, reply_id: int) -> None:
            self._send(name, Query(self._name, reply_id, path, dict(query)))

        return (await self._asked.ask([whom], send, timeout_s)).get(whom)

    def give_up(self) -> None:
        """End all open questions: the process that was asked has ended."""
        self._asked.give_up()

    def take(self, message: Query | QueryReply) -> None:
        """Answer a question, or pass an answer to the call that waits for it."""
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
            log.exception("page %s could not be made for %s", ask.path, ask.gateway)
            return
        self._send(ask.gateway, QueryReply(self._name, ask.reply_id, status, body))

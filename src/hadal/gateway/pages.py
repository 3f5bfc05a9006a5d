"""What one gateway asks another for, by path as HTTP has it: what only the front's process knows, or another's counts.

Knows the wire's Ask and Answer, and no page. Used by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from hadal.core.errors import HadalError
from hadal.core.gateway_messages import Answer, Ask
from hadal.core.wire import AnyMessage
from hadal.gateway.errors import as_api_error

log = logging.getLogger("hadal.gateway")

Page = Callable[[Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""Answers a query with a status and a body. Raises HadalError."""


class Pages:
    """The pages of this process, by path in `table`, and the questions that it has asked others."""

    def __init__(self, name: str, send: Callable[[str, AnyMessage], None]) -> None:
        """`name`: this process's on the wire."""
        self.table: dict[str, Page] = {}
        self._name = name
        self._send = send
        self._num_asked = 0
        self._asked: dict[int, asyncio.Future[Answer | None]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def ask(self, whom: str, path: str, query: Mapping[str, str], timeout_s: float) -> Answer | None:
        """Another process's page; None if it does not answer in time."""
        self._num_asked += 1
        reply_id = self._num_asked
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._asked[reply_id] = future
        self._send(whom, Ask(self._name, reply_id, path, dict(query)))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._asked[reply_id]

    def give_up(self) -> None:
        """Whoever was asked is gone."""
        for future in self._asked.values():
            if not future.done():
                future.set_result(None)

    def take(self, message: Ask | Answer) -> None:
        """Answer a question, or hand an answer to who waits for it."""
        if isinstance(message, Ask):
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif (future := self._asked.get(message.reply_id)) is not None and not future.done():
            future.set_result(message)

    async def _answer(self, ask: Ask) -> None:
        try:
            status, body = await self.table[ask.path](ask.query)
        except HadalError as error:
            refusal = as_api_error(error)
            status, body = refusal.status, refusal.body
        except Exception:
            log.exception("%s cannot be told to %s", ask.path, ask.gateway)
            return
        self._send(ask.gateway, Answer(self._name, ask.reply_id, status, body))

"""What one gateway asks another for, by path as HTTP has it: what only the front's process knows,
or another's counts.

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
from hadal.gateway.questions import Questions

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
        self._asked = Questions[Answer]()
        self._answering: set[asyncio.Task[None]] = set()

    async def ask(
        self, whom: str, path: str, query: Mapping[str, str], timeout_s: float
    ) -> Answer | None:
        """Another process's page; None if it does not answer in time."""

        def send(name: str, reply_id: int) -> None:
            self._send(name, Ask(self._name, reply_id, path, dict(query)))

        return (await self._asked.ask([whom], send, timeout_s)).get(whom)

    def give_up(self) -> None:
        """Whoever was asked is gone."""
        self._asked.give_up()

    def take(self, message: Ask | Answer) -> None:
        """Answer a question, or hand an answer to who waits for it."""
        if isinstance(message, Ask):
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            self._asked.take(message.gateway, message.reply_id, message)

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

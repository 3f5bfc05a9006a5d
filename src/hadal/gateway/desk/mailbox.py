"""Mailbox of the front's deliveries for one HTTP request, until its task takes them together.

A request with several choices has one mailbox and so one wake-up. If its client reads nothing, its
task stops taking deliveries and the mailbox fills; then its host stops the generations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

from hadal.core.messages.generation import Closing, Deliver, Generation
from hadal.runtime.process.logs import REQUEST_ID, fields

log = logging.getLogger("hadal.gateway")

Close: TypeAlias = "Callable[[Mailbox, Callable[[], None]], None]"
"""Method of a host that stops the generations of a mailbox, and calls the given function when their
units are known or overdue.
"""

MAX_WAITING = 4096
"""Maximum deliveries waiting in a mailbox of up to eight choices; with more choices, an eighth of
this per choice. Even a slow reader takes all of them together, so a full mailbox has no reader.
"""


class Outbox:
    """Deliveries for the generations of another gateway, sent there together; the counterpart of
    its mailboxes.
    """

    def __init__(self) -> None:
        self.open_ids: dict[str, str] = {}
        """Generations without their last delivery yet -> the id of their HTTP request in logs."""
        self._items: list[Deliver] = []

    def put(self, deliver: Deliver) -> None:
        """Add a delivery. A final one removes its generation from `open_ids`."""
        if deliver.final:
            self.open_ids.pop(deliver.request_id, None)
        self._items.append(deliver)

    def take(self) -> tuple[Deliver, ...]:
        """Return all deliveries since the last call, in order."""
        items, self._items = self._items, []
        return tuple(items)


class Mailbox:
    """Deliveries of one request's generations, each with the index of its choice."""

    __slots__ = (
        "_close",
        "_items",
        "_loop",
        "_most",
        "_waiter",
        "closings",
        "gone",
        "listener",
        "log_id",
        "open_ids",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        log_id: str = "",
        num_choices: int = 1,
        close: Close | None = None,
    ) -> None:
        """`close` stops the generations of a full mailbox; None: the mailbox has no limit."""
        self._most = max(MAX_WAITING, MAX_WAITING // 8 * num_choices)
        self._close = close
        self.log_id = log_id
        """Id of the HTTP request, for the log."""
        self.gone = False
        """True once the client left or stopped reading."""
        self.open_ids: dict[str, int] = {}
        """Generations without their last delivery yet -> index of the choice."""
        self.closings: dict[str, Closing] = {}
        """Request id -> closing of an ended generation, also if its deliveries are dropped."""
        self.listener: Callable[[], None] | None = None
        """Called for each delivery and when the client leaves, if no task waits in `take`."""
        self._items: list[tuple[int, Deliver]] = []
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def put(self, deliver: Deliver) -> None:
        """Add a delivery. It is dropped if its generation has ended or is not in this mailbox."""
        if deliver.closing is not None:
            self.closings[deliver.request_id] = deliver.closing
        index = self.open_ids.get(deliver.request_id)
        if index is None:
            return
        if deliver.final:
            del self.open_ids[deliver.request_id]
        self._items.append((index, deliver))
        if len(self._items) >= self._most and self._close is not None and not self.gone:
            log.info(
                "the client does not read the stream; the stream is stopped",
                extra=fields(request_id=self.log_id),
            )
            self.gone = True
            # Not called here: the front's pending effects must be applied before its next event.
            self._loop.call_soon(self._close, self, lambda: None)
        self._wake()

    def leave(self) -> None:
        """Wake the task so that it can clean up: the client went away."""
        self.gone = True
        self._wake()

    async def take(self, timeout_s: float) -> list[tuple[int, Deliver]]:
        """Return all deliveries, in order; maybe none after `timeout_s` or when the client left."""
        if not self._items and not self.gone:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        return self.take_now()

    def take_now(self) -> list[tuple[int, Deliver]]:
        """Return all deliveries, in order."""
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self.listener is not None:
            self.listener()


def mailbox_for(
    generations: Iterable[Generation], close: Close
) -> tuple[Mailbox, tuple[Generation, ...]]:
    """Return a mailbox for the choices of one request, and the generations to begin.

    A generation that asks for no token ends here, without being submitted.
    """
    generations = tuple(generations)
    mailbox = Mailbox(asyncio.get_running_loop(), REQUEST_ID.get(), len(generations), close)
    mailbox.open_ids = {
        generation.request_id: index for index, generation in enumerate(generations)
    }
    for generation in generations:
        if not generation.max_tokens:
            mailbox.put(Deliver(generation.request_id, (), final=True))
    return mailbox, tuple(generation for generation in generations if generation.max_tokens)

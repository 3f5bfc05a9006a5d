"""Where the front's deliveries for one HTTP request wait until its task takes them, all at once.

One request may have several choices; they share a mailbox and so one wake-up. A task that does not
come back to it, as its client reads nothing, fills it: then its host stops the generations. Knows
asyncio, nothing of HTTP.
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
"""A host's method: it stops the generations of a mailbox, and calls what it is given when they have
stopped.
"""

MAX_WAITING = 4096
"""Most deliveries that may wait in a mailbox of up to eight choices; beyond eight, an eighth of it
for each. Whoever reads at all, however slowly, takes all that wait at once, so a mailbox this full
is read by nobody.
"""


class Outbox:
    """Deliveries for the generations of another gateway, sent there together. The other side of its
    mailboxes.
    """

    def __init__(self) -> None:
        self.open_ids: dict[str, str] = {}
        """Generations whose last delivery has not come -> the id of the HTTP request of each, as
        logs have it.
        """
        self._items: list[Deliver] = []

    def put(self, deliver: Deliver) -> None:
        """Add a delivery."""
        if deliver.final:
            self.open_ids.pop(deliver.request_id, None)
        self._items.append(deliver)

    def take(self) -> tuple[Deliver, ...]:
        """All that came since the last time, in order."""
        items, self._items = self._items, []
        return tuple(items)


class Mailbox:
    """Deliveries of some generations, each under the index of its choice."""

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
        """`close` stops the generations of one that is full; None: it may grow."""
        self._most = max(MAX_WAITING, MAX_WAITING // 8 * num_choices)
        self._close = close
        self.log_id = log_id
        """The HTTP request's id, by which the log names it."""
        self.gone = False
        """The client left: nobody reads any more."""
        self.open_ids: dict[str, int] = {}
        """Generations whose last delivery has not come, and the index of each."""
        self.closings: dict[str, Closing] = {}
        """Closings of generations that ended, those included whose deliveries nobody wants any
        more.
        """
        self.listener: Callable[[], None] | None = None
        """Called for each delivery, and when the client leaves, unless a task waits in `take`."""
        self._items: list[tuple[int, Deliver]] = []
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def put(self, deliver: Deliver) -> None:
        """Add a delivery. One for a generation that ended or is not ours is dropped."""
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
                "nothing of the stream is read; it is stopped", extra=fields(request_id=self.log_id)
            )
            self.gone = True
            # Soon: what the front has decided with this is sent before what it decides next.
            self._loop.call_soon(self._close, self, lambda: None)
        self._wake()

    def leave(self) -> None:
        """The client went away: wake the task so that it can clean up."""
        self.gone = True
        self._wake()

    async def take(self, timeout_s: float) -> list[tuple[int, Deliver]]:
        """Return all that came, in order; an empty list after `timeout_s` or when the client
        left.
        """
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
        """Return all that came, in order."""
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
    """A mailbox for the choices of one request, and those that are to be begun.

    One that asks for no token at all has ended before anybody else needs to hear of it.
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

"""Where the front's deliveries for one HTTP request wait until its task takes them, all at once.

One request may have several choices; they share a mailbox and so one wake-up. Bounded by what was asked for: a
generation delivers at most its max_tokens tokens. Knows asyncio, nothing of HTTP.
"""

from __future__ import annotations

import asyncio

from hadal.core.seams import Closing, Deliver


class Mailbox:
    """Deliveries of some generations, each under the index of its choice."""

    __slots__ = ("_items", "_loop", "_waiter", "closings", "gone", "open_ids")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.gone = False
        """The client left: nobody reads any more."""
        self.open_ids: dict[str, int] = {}
        """Generations whose last delivery has not come, and the index of each."""
        self.closings: dict[str, Closing] = {}
        """Of generations that ended, those included whose deliveries nobody wants any more."""
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
        self._wake()

    def leave(self) -> None:
        """The client went away: wake the task so that it can clean up."""
        self.gone = True
        self._wake()

    async def take(self, timeout_s: float) -> list[tuple[int, Deliver]]:
        """Return all that came, in order; an empty list after `timeout_s` or when the client left."""
        if not self._items and not self.gone:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

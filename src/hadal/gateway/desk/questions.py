"""Open questions to other processes, which answer with messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

M = TypeVar("M")


class Questions(Generic[M]):
    """All open questions of one kind. Used only by the event loop's thread."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._open: dict[tuple[str, int], asyncio.Future[M]] = {}

    async def ask(
        self, whom: Iterable[str], send: Callable[[str, int], None], timeout_s: float
    ) -> dict[str, M]:
        """Ask processes by `send(name, reply_id)`. Return name -> answer, if it came in time."""
        self._num_asked += 1
        reply_id = self._num_asked
        name_to_future = {name: asyncio.get_running_loop().create_future() for name in whom}
        self._open |= {(name, reply_id): future for name, future in name_to_future.items()}
        try:
            for name in name_to_future:
                send(name, reply_id)
            if name_to_future:
                await asyncio.wait(name_to_future.values(), timeout=timeout_s)
        finally:
            for name in name_to_future:
                del self._open[name, reply_id]
        return {
            name: future.result()
            for name, future in name_to_future.items()
            if future.done() and not future.cancelled()
        }

    def take(self, name: str, reply_id: int, answer: M) -> None:
        """Accept an answer. It is dropped if no call waits for it any more."""
        future = self._open.get((name, reply_id))
        if future is not None and not future.done():
            future.set_result(answer)

    def give_up(self) -> None:
        """End all open questions: the processes asked have ended."""
        for future in self._open.values():
            future.cancel()

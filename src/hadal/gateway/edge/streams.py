"""Serve running streams without waking their tasks: one callback pushes all that have something to send,
and one timer watches for those to which nothing comes.

    a mailbox with something in it ──► ready ──┐ once for all of them
                                               └──► push ──► the connection
    one timer ──► late

Waking a task and setting a timer cost more than making a token's event.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Write = Callable[[bytes], bool]
"""Writes a part of a body to its connection. Returns False, with nothing written, if the connection is
closed or its buffer is full.
"""


class Stream(Protocol):
    """A running stream. Its methods raise nothing."""

    due_s: float
    """Time at which it is late, in the clock's seconds. It only moves on."""

    def push(self) -> None:
        """Something may have come."""

    def late(self) -> None:
        """Nothing came until `due_s`."""


class Streams:
    """All streams of a gateway."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._running: set[Stream] = set()
        self._ready: list[Stream] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = math.inf
        """Time for which the timer is set."""

    def join(self, stream: Stream) -> None:
        """Begin to watch a stream's time."""
        self._running.add(stream)
        if stream.due_s < self._armed_s:
            self._arm()

    def leave(self, stream: Stream) -> None:
        """Watch it no longer."""
        self._running.discard(stream)

    def ready(self, stream: Stream) -> None:
        """Push a stream soon, together with others that are ready."""
        if not self._ready:  # In no request's context: the log would name it.
            asyncio.get_running_loop().call_soon(self._push, context=contextvars.Context())
        self._ready.append(stream)

    def _push(self) -> None:
        ready, self._ready = self._ready, []
        for stream in ready:
            if stream in self._running:
                stream.push()

    def _arm(self) -> None:
        """Wait for the stream that is due first. Streams move on meanwhile, and the timer stays."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._armed_s = min((stream.due_s for stream in self._running), default=math.inf)
        if self._running:
            wait_s = max(0.0, self._armed_s - self._now())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        now_s = self._now()
        due = [each for each in self._running if each.due_s <= now_s]
        self._running.difference_update(due)
        self._arm()
        for stream in due:
            stream.late()


def refuse(data: bytes) -> bool:
    """Stand for the connection of a server that lets nobody write to it."""
    return False


@dataclass(frozen=True)
class Outlet:
    """What a stream needs to write by itself."""

    streams: Streams
    write: Write

"""Serve running streams without waking their tasks: one callback pushes all streams with something
to send, and one timer finds streams that receive nothing.

    a mailbox with a delivery in it ─► ready ──┐ once for all of them
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
"""Function that writes a part of a body to its connection. Returns False, with nothing written, if
the connection is closed, its buffer is full, or it takes no chunks (HTTP/1.0).
"""


class Stream(Protocol):
    """Running stream. Its methods must not raise."""

    due_s: float
    """Time at which the stream is late, in the clock's seconds. It only increases."""

    def push(self) -> None:
        """Send new deliveries, if there are any."""

    def late(self) -> None:
        """Send a keep-alive or an error, because nothing arrived until `due_s`."""


class Streams:
    """All running streams of a gateway."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._running: set[Stream] = set()
        self._ready: list[Stream] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = math.inf
        """Time for which the timer is set."""

    def join(self, stream: Stream) -> None:
        """Start to watch the stream's `due_s`."""
        self._running.add(stream)
        if stream.due_s < self._armed_s:
            self._arm()

    def leave(self, stream: Stream) -> None:
        """Stop watching the stream."""
        self._running.discard(stream)

    def ready(self, stream: Stream) -> None:
        """Push a stream soon, together with others that are ready."""
        if not self._ready:  # An empty context: logs must not carry one request's id.
            asyncio.get_running_loop().call_soon(self._push, context=contextvars.Context())
        self._ready.append(stream)

    def _push(self) -> None:
        ready, self._ready = self._ready, []
        for stream in ready:
            if stream in self._running:
                stream.push()

    def _arm(self) -> None:
        """Set the timer for the earliest `due_s`. Streams that postpone theirs do not move it."""
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
    """Stand in for a connection on servers without direct writes: always return False."""
    return False


@dataclass(frozen=True)
class Outlet:
    """Objects through which a stream writes itself, outside its request's asyncio task."""

    streams: Streams
    write: Write

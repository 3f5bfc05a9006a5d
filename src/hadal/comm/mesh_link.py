"""One connection of the TCP mesh: frames in, frames out, never waiting.

Any thread may call; a lock per direction keeps each stream in order. What a frame means, where its payload goes and
what a broken connection means are the owner's affair (comm/mesh). Knows no generations and no threads.

Polled edge-triggered, so `receive` reads until the socket is empty and `flush` writes until it is full.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from hadal.comm.frames import DATA, HEADER_BYTES, Frame, FrameError, unpack_header

STAGING_BYTES = 64 * 1024
"""Read at once: small frames come several to a system call and are copied out, large ones go where they belong."""


class PauseLink(Exception):
    """Raised by an owner that cannot take the next frame yet, after it has set `is_paused` under a lock of its own: the
    frame stays where it is until `receive` is called again."""


class Owner(Protocol):
    """What a link asks and tells. Called by whichever thread moved the bytes."""

    def begin(self, link: Link, frame: Frame) -> memoryview | None:
        """Where the payload goes; None: it is read and dropped. Raises PauseLink."""
        ...

    def ended(self, link: Link, frame: Frame, payload: memoryview | None) -> None:
        """The payload is complete. Raises FrameError, which breaks the link."""
        ...

    def sent(self, token: Any) -> None:
        """The frame that was queued with this token has left."""
        ...

    def broken(self, link: Link, reason: str) -> None:
        """Nothing more will come. Called with no lock of the link held, possibly more than once."""
        ...


@dataclass(slots=True)
class _Outgoing:
    """What is left to send of a frame."""

    view: memoryview
    payload: memoryview | None
    is_data: bool
    is_started: bool
    token: Any


class Link:
    """A non-blocking socket with the frame under way in each direction."""

    def __init__(self, sock: socket.socket, owner: Owner, rank: int = -1, epoch: str = "") -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.rank = rank
        """-1 until an accepted connection has said who it is."""
        self.epoch = epoch
        self.generation = -1
        """The latest one the peer said HELLO for."""
        self.aborted: tuple[int, tuple[int, ...], str] = (-1, (), "")
        """The peer's latest ABORT: generation, lost ranks, reason."""
        self.is_broken = False
        """Set by the owner: it is not used any more, and will be closed."""
        self.is_closed = False
        self._owner = owner
        self._rx_lock = threading.Lock()
        self._tx_lock = threading.Lock()
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0  # staging[start:end] is read and not parsed.
        self._frame: Frame | None = None
        self._view: memoryview | None = None
        self._done_bytes = 0
        self.is_paused = False
        self._queue: deque[_Outgoing] = deque()

    # ---- in ----
    def receive(self, is_hung_up: bool = False) -> None:
        """Take in all that has arrived. `is_hung_up`: the poll said that the end of the stream is there."""
        reason = ""
        with self._rx_lock:
            try:
                self._receive(is_hung_up)
            except (BlockingIOError, InterruptedError):
                pass  # The socket is empty.
            except OSError as error:
                reason = f"connection lost: {error.strerror or error}"
            except FrameError as error:
                reason = str(error)
        if reason:
            self._owner.broken(self, reason)

    def _receive(self, is_hung_up: bool) -> None:
        is_empty = False
        while not self.is_closed:
            if self._frame is None and not self._begin():
                if self.is_paused:
                    if is_hung_up:
                        raise ConnectionResetError("the peer closed it")
                    return
                if is_empty:
                    return
                is_empty = self._fill_staging() and not is_hung_up
                continue
            assert self._frame is not None
            left = self._frame.num_bytes - self._done_bytes
            if left and self._end > self._start:
                left -= self._take_staged(left)
            if left:
                if is_empty:
                    return
                is_empty = self._read_payload(left) and not is_hung_up
            elif self._frame is not None:
                frame, view = self._frame, self._view
                self._frame = self._view = None
                self._owner.ended(self, frame, view)

    def _begin(self) -> bool:
        """Parse the next header, if it is there and the owner takes it."""
        if self._end - self._start < HEADER_BYTES:
            return False
        frame = unpack_header(self._staging, self._start)
        try:
            self._view = self._owner.begin(self, frame)
        except PauseLink:
            return False
        self.is_paused = False
        self._frame, self._done_bytes = frame, 0
        self._start += HEADER_BYTES
        return True

    def _fill_staging(self) -> bool:
        """Return whether the socket is empty now: it gave less than there was room for."""
        if self._start:
            rest = bytes(self._staging[self._start : self._end])
            self._staging[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = STAGING_BYTES - self._end
        num_bytes = self.sock.recv_into(self._staging[self._end :], room)
        if not num_bytes:
            raise ConnectionResetError("the peer closed it")
        self._end += num_bytes
        return num_bytes < room

    def _take_staged(self, left: int) -> int:
        num_bytes = min(left, self._end - self._start)
        if self._view is not None:
            at = self._done_bytes
            self._view[at : at + num_bytes] = self._staging[self._start : self._start + num_bytes]
        self._start += num_bytes
        self._done_bytes += num_bytes
        return num_bytes

    def _read_payload(self, left: int) -> bool:
        """As _fill_staging, straight to where the payload belongs. What nobody wants goes through the staging area."""
        at = self._done_bytes
        into = self._staging[:left] if self._view is None else self._view[at : at + left]
        num_bytes = self.sock.recv_into(into)
        if not num_bytes:
            raise ConnectionResetError("the peer closed it")
        self._done_bytes += num_bytes
        return num_bytes < len(into)

    # ---- out ----
    @property
    def is_sending(self) -> bool:
        return bool(self._queue)

    def send(self, head: bytes, payload: memoryview | None = None, token: Any = None) -> bool:
        """Send a frame, or what fits of it; the rest leaves by `flush`. Returns whether it has left.

        If not, the owner hears of it with `token`, and the payload must stay as it is until then.
        """
        reason = ""
        is_sent = False
        with self._tx_lock:
            if self.is_closed:
                return False
            item = _Outgoing(memoryview(head), payload, payload is not None, False, token)
            if self._queue:
                self._queue.append(item)
                return False
            try:
                is_sent = self._push(item)
            except (BlockingIOError, InterruptedError):
                pass  # The socket is full.
            except OSError as error:
                reason = f"connection lost: {error.strerror or error}"
            if not is_sent:
                self._queue.append(item)
        if reason:
            self._owner.broken(self, reason)
        return is_sent

    def _push(self, item: _Outgoing) -> bool:
        """Send until all has left (True) or the socket is full (BlockingIOError)."""
        while True:
            views = [item.view] if item.payload is None else [item.view, item.payload]
            num_bytes = self.sock.sendmsg(views)
            item.is_started |= num_bytes > 0
            if num_bytes >= len(item.view) and item.payload is not None:
                num_bytes -= len(item.view)
                item.view, item.payload = item.payload, None
            item.view = item.view[num_bytes:]
            if not item.view and item.payload is None:
                return True

    def flush(self) -> None:
        """Go on with what is queued: the poll said that there is room."""
        reason = ""
        tokens = []
        # The queue is looked at under the lock: a `send` that finds the socket full this moment is still to queue, and
        # the poll will not tell of this room again.
        with self._tx_lock:
            try:
                while self._queue and not self.is_closed and self._push(self._queue[0]):
                    tokens.append(self._queue.popleft().token)
            except (BlockingIOError, InterruptedError):
                pass  # The socket is full again.
            except OSError as error:
                reason = f"connection lost: {error.strerror or error}"
        for token in tokens:
            if token is not None:
                self._owner.sent(token)
        if reason:
            self._owner.broken(self, reason)

    # ---- ends ----
    def retire(self) -> None:
        """Let go of all memory of others: from now on no payload under way is written to where it was going, and what
        is left of a frame that was begun is sent from a copy. Data not begun is dropped."""
        with self._rx_lock:
            if self._frame is not None and self._frame.kind == DATA:
                self._view = None
        with self._tx_lock:
            kept: deque[_Outgoing] = deque()
            for item in self._queue:
                if item.is_started and (item.is_data or item.token is not None):
                    rest = bytes(item.view) + (b"" if item.payload is None else bytes(item.payload))
                    kept.append(_Outgoing(memoryview(rest), None, False, True, None))
                elif not item.is_data:
                    kept.append(item)
            self._queue = kept

    def close(self) -> None:
        """Close the socket, once nobody is in it."""
        with self._rx_lock, self._tx_lock:
            if not self.is_closed:
                self.is_closed = True
                self._view = None
                self._queue.clear()
                self.sock.close()

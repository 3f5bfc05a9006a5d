"""One connection of the TCP mesh: reads and writes frames, never waits.

Thread-safe; a lock per direction keeps each stream in order. The owner (comm/mesh) decides what a
frame means, where its payload goes and what a broken connection means. Does not depend on
formations or threads.

The poll is edge-triggered, so `receive` reads until the socket is empty and `flush` writes until it
is full.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from hadal.comm.mesh.frames import DATA, HEADER_BYTES, Frame, FrameError, unpack_header
from hadal.core.handshake import TAG_BYTES, Handshake, Seal

STAGING_BYTES = 64 * 1024
"""Bytes read at once. Several small frames come in one system call and are copied out; large
payloads are read directly into their destination.
"""


class PauseLink(Exception):
    """The owner cannot take the next frame yet. It has set `is_paused`, under its own lock. The
    frame stays unread until `receive` is called again.
    """


class Owner(Protocol):
    """Callbacks of a link. The thread that moved the bytes calls them."""

    def begin(self, link: Link, frame: Frame) -> memoryview | None:
        """Return the memory for the payload; None: read and drop it. Raises PauseLink, or
        FrameError, which breaks the link.
        """
        ...

    def ended(self, link: Link, frame: Frame, payload: memoryview | None) -> None:
        """Handle a complete frame. Raises FrameError, which breaks the link."""
        ...

    def sent(self, token: Any) -> None:
        """Handle the end of sending a frame that was queued with this token."""
        ...

    def broken(self, link: Link, reason: str) -> None:
        """Handle the end of the connection. Called without the link's locks, perhaps repeatedly."""
        ...


@dataclass(slots=True)
class _Outgoing:
    """Unsent rest of a frame."""

    views: list[memoryview]
    is_data: bool
    is_tagged: bool
    """True if the frame has its tag or needs none. The tag is made when sending starts, because a
    frame that is never sent must not be counted.
    """
    is_started: bool
    token: Any


class Link:
    """Non-blocking socket, the reader and writer of its frames, and this side of its handshake."""

    def __init__(
        self,
        sock: socket.socket,
        owner: Owner,
        handshake: Handshake,
        rank: int = -1,
        epoch: str = "",
    ) -> None:
        self.sock = sock
        self.handshake = handshake
        self.is_proven = False
        """True once the peer has proven that it belongs to this deployment; until then only
        CHALLENGE and HELLO are accepted.
        """
        self.fd = sock.fileno()
        self.rank = rank
        """Rank of the peer; -1 until an accepted connection has sent its HELLO."""
        self.epoch = epoch
        self.is_hello_due = False
        """True if the owner wants to send HELLO but the peer's CHALLENGE, which the proof needs,
        has not arrived.
        """
        self.formation = -1
        """Latest formation in a HELLO from the peer."""
        self.hello_formation = -1
        """Latest formation in a HELLO that we sent."""
        self.aborted: tuple[int, tuple[int, ...], str] = (-1, (), "")
        """Latest ABORT from the peer: formation, lost ranks, reason."""
        self.is_broken = False
        """Set by the owner: the link is no longer used and will be closed."""
        self.is_paused = False
        """Set by the owner together with PauseLink."""
        self._owner = owner
        self._reader = FrameReader(sock)
        self._writer = FrameWriter(sock)

    def challenged(self, nonce: bytes) -> None:
        """Apply the peer's CHALLENGE. Raises FrameError."""
        try:
            self.handshake.challenged(nonce)
        except ValueError as error:
            raise FrameError(str(error)) from error
        self._reader.seal = self.handshake.seal(is_outgoing=False)
        self._writer.seal = self.handshake.seal(is_outgoing=True)

    @property
    def is_sending(self) -> bool:
        return self._writer.is_sending

    def receive(self, is_hung_up: bool = False) -> None:
        """Read all available bytes. `is_hung_up`: the poll reported the end of the stream."""
        reason = self._reader.receive(self, self._owner, is_hung_up)
        if reason:
            self._owner.broken(self, reason)

    def send(self, head: bytes, payload: memoryview | None = None, token: Any = None) -> bool:
        """Send a frame, or the part that fits; `flush` sends the rest. Return whether it was sent
        completely.

        If not, `Owner.sent` is called with `token` later, and the payload must not change until
        then.
        """
        is_sent, reason = self._writer.send(head, payload, token)
        if reason:
            self._owner.broken(self, reason)
        return is_sent

    def flush(self) -> None:
        """Send queued frames, after the poll reported space in the socket."""
        tokens, reason = self._writer.flush()
        for token in tokens:
            if token is not None:
                self._owner.sent(token)
        if reason:
            self._owner.broken(self, reason)

    def retire(self) -> None:
        """Stop using the owner's memory: payloads in progress are not written to their destination,
        the rest of a started frame is sent from a copy, and data not started are dropped.
        """
        self._reader.retire()
        self._writer.retire()

    def close(self) -> None:
        """Close the socket, once no thread uses it."""
        with self._reader.lock, self._writer.lock:
            self._reader.close()
            self._writer.close()
            self.sock.close()


class FrameReader:
    """Reader of frames: the incoming stream and the current frame."""

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.Lock()
        self.seal: Seal | None = None
        """Checker of tags, on connections with tagged frames."""
        self._sock = sock
        self._is_closed = False
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0  # staging[start:end] is read but not parsed.
        self._frame: Frame | None = None
        self._view: memoryview | None = None
        self._done_bytes = 0
        self._tag = bytearray()
        """Part of the current frame's tag received so far."""
        self._digest: Any = None
        """Digest of the current frame, on connections with tagged frames."""

    def receive(self, link: Link, owner: Owner, is_hung_up: bool) -> str:
        """Read all available bytes. Return why the connection is broken, or ""."""
        with self.lock:
            try:
                self._receive(link, owner, is_hung_up)
            except (BlockingIOError, InterruptedError):
                pass  # The socket is empty.
            except OSError as error:
                return _lost(error)
            except FrameError as error:
                return str(error)
        return ""

    def _receive(self, link: Link, owner: Owner, is_hung_up: bool) -> None:
        is_empty = False
        while not self._is_closed:
            if self._frame is None and not self._begin(link, owner):
                if link.is_paused:
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
            elif self._digest is not None and len(self._tag) < TAG_BYTES:
                if self._end > self._start:
                    self._take_tag()
                    continue
                if is_empty:
                    return
                is_empty = self._fill_staging() and not is_hung_up
            else:
                if self._digest is not None and self._digest.digest() != self._tag:
                    raise FrameError("the received data was changed on its way")
                frame, view = self._frame, self._view
                self._frame = self._view = self._digest = None
                owner.ended(link, frame, view)

    def _begin(self, link: Link, owner: Owner) -> bool:
        """Parse the next header, if it has arrived and the owner accepts it."""
        if self._end - self._start < HEADER_BYTES:
            return False
        frame = unpack_header(self._staging, self._start)
        try:
            self._view = owner.begin(link, frame)
        except PauseLink:
            return False
        link.is_paused = False
        self._frame, self._done_bytes = frame, 0
        if self.seal is not None:
            self._digest = self.seal.begin()
            self._digest.update(self._staging[self._start : self._start + HEADER_BYTES])
            self._tag.clear()
        self._start += HEADER_BYTES
        return True

    def _fill_staging(self) -> bool:
        """Read into the staging area. Return whether the socket is now empty: it filled less than
        the free space.
        """
        if self._start:
            rest = bytes(self._staging[self._start : self._end])
            self._staging[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = STAGING_BYTES - self._end
        num_bytes = self._sock.recv_into(self._staging[self._end :], room)
        if not num_bytes:
            raise ConnectionResetError("the peer closed it")
        self._end += num_bytes
        return num_bytes < room

    def _take_tag(self) -> None:
        end = min(self._end, self._start + TAG_BYTES - len(self._tag))
        self._tag += self._staging[self._start : end]
        self._start = end

    def _take_staged(self, left: int) -> int:
        num_bytes = min(left, self._end - self._start)
        if self._digest is not None:
            self._digest.update(self._staging[self._start : self._start + num_bytes])
        if self._view is not None:
            at = self._done_bytes
            self._view[at : at + num_bytes] = self._staging[self._start : self._start + num_bytes]
        self._start += num_bytes
        self._done_bytes += num_bytes
        return num_bytes

    def _read_payload(self, left: int) -> bool:
        """Read payload bytes directly into their destination, or into the staging area if they are
        dropped. Return as _fill_staging does.
        """
        at = self._done_bytes
        into = self._staging[:left] if self._view is None else self._view[at : at + left]
        num_bytes = self._sock.recv_into(into)
        if not num_bytes:
            raise ConnectionResetError("the peer closed it")
        if self._digest is not None:
            self._digest.update(into[:num_bytes])
        self._done_bytes += num_bytes
        return num_bytes < len(into)

    def retire(self) -> None:
        """Drop the rest of a DATA frame in progress instead of writing it to its destination."""
        with self.lock:
            if self._frame is not None and self._frame.kind == DATA:
                self._view = None

    def close(self) -> None:
        """Stop reading. The lock must be held."""
        self._is_closed = True
        self._view = None


class FrameWriter:
    """Writer of frames, with a queue of frames that the socket has not accepted yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.Lock()
        self.seal: Seal | None = None
        """Maker of tags, on connections with tagged frames."""
        self._sock = sock
        self._is_closed = False
        self._has_challenged = False
        """True once the first frame, our CHALLENGE, was sent or queued."""
        self._queue: deque[_Outgoing] = deque()

    @property
    def is_sending(self) -> bool:
        return bool(self._queue)

    def send(self, head: bytes, payload: memoryview | None, token: Any) -> tuple[bool, str]:
        """Send or queue a frame. Return whether it was sent completely, and why the connection is
        broken, or "".
        """
        with self.lock:
            if self._is_closed:
                return False, ""
            views = [memoryview(head)] if payload is None else [memoryview(head), payload]
            # Our CHALLENGE has no tag, even if the peer's has arrived before ours was sent.
            is_plain = self.seal is None or not self._has_challenged
            self._has_challenged = True
            item = _Outgoing(views, payload is not None, is_plain, False, token)
            if self._queue:
                self._queue.append(item)
                return False, ""
            try:
                return self._push(item), ""
            except (BlockingIOError, InterruptedError):
                reason = ""  # The socket is full.
            except OSError as error:
                reason = _lost(error)
            self._queue.append(item)
        return False, reason

    def _push(self, item: _Outgoing) -> bool:
        """Send until the frame is complete (True) or the socket is full (BlockingIOError)."""
        if not item.is_tagged:
            assert self.seal is not None
            item.views.append(memoryview(self.seal.tag(item.views)))
            item.is_tagged = item.is_started = True
        while True:
            num_bytes = self._sock.sendmsg(item.views)
            item.is_started |= num_bytes > 0
            while item.views and num_bytes >= len(item.views[0]):
                num_bytes -= len(item.views.pop(0))
            if not item.views:
                return True
            item.views[0] = item.views[0][num_bytes:]

    def flush(self) -> tuple[list[Any], str]:
        """Send queued frames. Return the tokens of completed frames, and why the connection is
        broken, or "".
        """
        reason = ""
        tokens = []
        # Check the queue under the lock. Otherwise a concurrent `send` could find the socket full
        # and queue its frame after this check, and the poll would not report the same space again.
        with self.lock:
            try:
                while self._queue and not self._is_closed and self._push(self._queue[0]):
                    tokens.append(self._queue.popleft().token)
            except (BlockingIOError, InterruptedError):
                pass  # The socket is full again.
            except OSError as error:
                reason = _lost(error)
        return tokens, reason

    def retire(self) -> None:
        """Replace the rest of a started frame by a copy, and drop data not started."""
        with self.lock:
            kept: deque[_Outgoing] = deque()
            for item in self._queue:
                if item.is_started and (item.is_data or item.token is not None):
                    rest = b"".join(item.views)
                    kept.append(_Outgoing([memoryview(rest)], False, True, True, None))
                elif not item.is_data:
                    kept.append(item)
            self._queue = kept

    def close(self) -> None:
        """Drop all frames and stop sending. The lock must be held."""
        self._is_closed = True
        self._queue.clear()


def _lost(error: OSError) -> str:
    return f"connection lost: {error.strerror or error}"

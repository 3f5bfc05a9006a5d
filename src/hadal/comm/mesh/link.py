"""One connection of the TCP mesh: frames in, frames out, never waiting.

Any thread may call; a lock per direction keeps each stream in order. What a frame means, where its
payload goes and what a broken connection means are the owner's affair (comm/mesh). Knows no
formations and no threads.

Polled edge-triggered, so `receive` reads until the socket is empty and `flush` writes until it is
full.
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
"""Read at once: small frames come several to a system call and are copied out, large ones go where
they belong.
"""


class PauseLink(Exception):
    """Raised by an owner that cannot take the next frame yet, after it has set `is_paused` under a
    lock of its own: the frame stays where it is until `receive` is called again.
    """


class Owner(Protocol):
    """What a link asks and reports. Called by whichever thread moved the bytes."""

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

    views: list[memoryview]
    is_data: bool
    is_tagged: bool
    """Or needs no tag. The tag is made when the frame is begun, as one that is never sent must not
    count.
    """
    is_started: bool
    token: Any


class Link:
    """A non-blocking socket, a reader and a writer of its frames, and this side of the handshake on
    it.
    """

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
        """The other side has shown that it is of this deployment; until then nothing but its hello
        is heard.
        """
        self.fd = sock.fileno()
        self.rank = rank
        """-1 until an accepted connection has said who it is."""
        self.epoch = epoch
        self.is_hello_due = False
        """The owner has said HELLO before the other side's CHALLENGE was here, without which it
        proves nothing.
        """
        self.formation = -1
        """The latest one the peer said HELLO for."""
        self.said_formation = -1
        """The latest one that we said HELLO for."""
        self.aborted: tuple[int, tuple[int, ...], str] = (-1, (), "")
        """The peer's latest ABORT: formation, lost ranks, reason."""
        self.is_broken = False
        """Set by the owner: it is not used any more, and will be closed."""
        self.is_paused = False
        """Set by the owner with PauseLink."""
        self._owner = owner
        self._reader = FrameReader(sock)
        self._writer = FrameWriter(sock)

    def challenged(self, nonce: bytes) -> None:
        """The other side's CHALLENGE is here. Raises FrameError."""
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
        """Take in all that has arrived. `is_hung_up`: the poll reported the end of the stream."""
        reason = self._reader.receive(self, self._owner, is_hung_up)
        if reason:
            self._owner.broken(self, reason)

    def send(self, head: bytes, payload: memoryview | None = None, token: Any = None) -> bool:
        """Send a frame, or what fits of it; the rest leaves by `flush`. Returns whether it has
        left.

        If not, the owner hears of it with `token`, and the payload must stay as it is until then.
        """
        is_sent, reason = self._writer.send(head, payload, token)
        if reason:
            self._owner.broken(self, reason)
        return is_sent

    def flush(self) -> None:
        """Send queued frames: the poll reported room in the socket."""
        tokens, reason = self._writer.flush()
        for token in tokens:
            if token is not None:
                self._owner.sent(token)
        if reason:
            self._owner.broken(self, reason)

    def retire(self) -> None:
        """Release all memory of others: from now on no payload under way is written to where it was
        going, and what is left of a frame that was begun is sent from a copy. Data not begun is
        dropped.
        """
        self._reader.retire()
        self._writer.retire()

    def close(self) -> None:
        """Close the socket, once no thread is in it."""
        with self._reader.lock, self._writer.lock:
            self._reader.close()
            self._writer.close()
            self.sock.close()


class FrameReader:
    """Frames in: the stream that arrives, and the frame under way."""

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.Lock()
        self.seal: Seal | None = None
        """Checks tags, where frames have them."""
        self._sock = sock
        self._is_closed = False
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0  # staging[start:end] is read and not parsed.
        self._frame: Frame | None = None
        self._view: memoryview | None = None
        self._done_bytes = 0
        self._tag = bytearray()
        """Part of the tag behind the frame under way that has arrived."""
        self._digest: Any = None
        """Digest of the frame under way, where frames are tagged."""

    def receive(self, link: Link, owner: Owner, is_hung_up: bool) -> str:
        """Take in all that has arrived, and return why the connection is broken, or ""."""
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
                    raise FrameError("what came was changed on its way")
                frame, view = self._frame, self._view
                self._frame = self._view = self._digest = None
                owner.ended(link, frame, view)

    def _begin(self, link: Link, owner: Owner) -> bool:
        """Parse the next header, if it is there and the owner takes it."""
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
        """Return whether the socket is empty now: it gave less than there was room for."""
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
        """Read the payload straight to where it belongs, as _fill_staging reads the rest. What
        nobody wants goes through the staging area.
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
        """Write no data of a frame under way any more."""
        with self.lock:
            if self._frame is not None and self._frame.kind == DATA:
                self._view = None

    def close(self) -> None:
        """Read nothing any more. With the lock held."""
        self._is_closed = True
        self._view = None


class FrameWriter:
    """Frames out: those that the socket has not taken yet, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.Lock()
        self.seal: Seal | None = None
        """Makes tags, where frames have them."""
        self._sock = sock
        self._is_closed = False
        self._has_challenged = False
        """The first frame of all is our CHALLENGE."""
        self._queue: deque[_Outgoing] = deque()

    @property
    def is_sending(self) -> bool:
        return bool(self._queue)

    def send(self, head: bytes, payload: memoryview | None, token: Any) -> tuple[bool, str]:
        """Send or queue a frame. Return whether it has left, and why the connection is broken, or
        "".
        """
        with self.lock:
            if self._is_closed:
                return False, ""
            views = [memoryview(head)] if payload is None else [memoryview(head), payload]
            # Our CHALLENGE carries no tag, also where the other's is here before ours has left.
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
        """Send until all has left (True) or the socket is full (BlockingIOError)."""
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
        """Send queued frames. Return the tokens of those that have left, and why the connection is
        broken, or "".
        """
        reason = ""
        tokens = []
        # The queue is looked at under the lock: a `send` that finds the socket full this moment is
        # still to queue, and the poll will not report this room again.
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
        """Send the rest of a frame that was begun from a copy, and drop data not begun."""
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
        """Drop all frames and send nothing any more. With the lock held."""
        self._is_closed = True
        self._queue.clear()


def _lost(error: OSError) -> str:
    return f"connection lost: {error.strerror or error}"

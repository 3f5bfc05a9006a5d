"""One connection of the TCP mesh: frames in, frames out, never waiting.

Any thread may call; a lock per direction keeps each stream in order. What a frame means, where its
payload goes and what a broken connection means are the owner's affair (comm/mesh). Knows no
formations and no threads.

Polled edge-triggered, so `receive` reads until the socket is empty and `flush` writes until it is
full.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hadal.core.errors import HadalError
from hadal.core.handshake import PROOF_BYTES, TAG_BYTES, Handshake, Seal

# The bytes between two ranks of the TCP mesh: a header of 24 bytes, then the payload.
#
#     CHALLENGE  a nonce, first on a connection
#     HELLO      who I am, whom I take you for, and the formation I am in, with the proof that I may say so: as soon as
#                the other's CHALLENGE is there, and at every formation
#     DATA       one rank's part of one exchange
#     ABORT      this formation failed for me: who is lost, and why
#
# Where packets leave the host a tag follows every frame after the CHALLENGE (core/handshake). Knows
# no sockets and keeps no state. What a peer sent is checked here and refused with FrameError.


HELLO, DATA, ABORT, CHALLENGE = 1, 2, 3, 4

MAX_PAYLOAD_BYTES = 1 << 31
MAX_CONTROL_BYTES = 4096
"""Most bytes of any frame but DATA."""
MAX_REASON_BYTES = 1000
MAX_LOST_RANKS = 1000

_MAGIC = b"HdM2"
_HEADER = struct.Struct("<4sIIIQ")
HEADER_BYTES = _HEADER.size


class FrameError(HadalError):
    """What arrived is not this protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header."""

    kind: int
    formation: int
    sequence: int
    """Which exchange of its formation a DATA frame belongs to."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks, and to whom it believes to speak."""

    rank: int
    epoch: str
    to_rank: int
    to_epoch: str


def pack_header(kind: int, formation: int, sequence: int, num_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, kind, formation, sequence, num_bytes)


def unpack_header(data: memoryview, at: int) -> Frame:
    """Read the header that begins at `at`. Raises FrameError."""
    magic, kind, formation, sequence, num_bytes = _HEADER.unpack_from(data, at)
    if magic != _MAGIC or kind not in (HELLO, DATA, ABORT, CHALLENGE):
        raise FrameError(f"no frame of the mesh: {magic!r}, kind {kind}")
    limit = MAX_PAYLOAD_BYTES if kind == DATA else MAX_CONTROL_BYTES
    if num_bytes > limit:
        raise FrameError(f"a frame of {num_bytes} bytes; {limit} is the limit")
    return Frame(kind, formation, sequence, num_bytes)


def pack_challenge(nonce: bytes) -> bytes:
    """A whole CHALLENGE frame."""
    return pack_header(CHALLENGE, 0, 0, len(nonce)) + nonce


def hello_claim(formation: int, hello: Hello) -> bytes:
    """What a HELLO says, as it is proven and sent."""
    return f"{formation} {hello.rank} {hello.to_rank}\n{hello.epoch}\n{hello.to_epoch}".encode()


def pack_hello(formation: int, claim: bytes, proof: bytes) -> bytes:
    """A whole HELLO frame; `claim`: its hello_claim."""
    return pack_header(HELLO, formation, 0, len(proof) + len(claim)) + proof + claim


def unpack_hello(formation: int, body: bytes) -> tuple[Hello, bytes, bytes]:
    """(who speaks to whom, the claim, its proof), which is still to be checked. Raises
    FrameError.
    """
    proof, claim = body[:PROOF_BYTES], body[PROOF_BYTES:]
    try:
        numbers, epoch, to_epoch = claim.decode().split("\n")
        said, rank, to_rank = map(int, numbers.split(" "))
    except ValueError as error:
        raise FrameError("a malformed HELLO") from error
    if said != formation:
        raise FrameError(f"a HELLO for formation {said} in a frame of {formation}")
    return Hello(rank, epoch, to_rank, to_epoch), claim, proof


def pack_abort(formation: int, ranks: tuple[int, ...], reason: str) -> bytes:
    """A whole ABORT frame."""
    text = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    body = f"{' '.join(map(str, ranks[:MAX_LOST_RANKS]))}\n{text}".encode()[:MAX_CONTROL_BYTES]
    return pack_header(ABORT, formation, 0, len(body)) + body


def unpack_abort(body: bytes) -> tuple[tuple[int, ...], str]:
    """Return the lost ranks and the reason. Raises FrameError."""
    try:
        ranks, _, reason = body.decode(errors="replace").partition("\n")
        return tuple(map(int, ranks.split())), reason
    except ValueError as error:
        raise FrameError("a malformed ABORT") from error


# Connections that were refused: counted by listener, and logged, seldom, since who
# wants to can make many.
#
# A process counts those of all its listeners together, whoever made them: its host tells the
# gateway (core/messages, Refused), where operators see them.


log = logging.getLogger(__name__)

REFUSALS_S = 60.0
"""Seconds between two lines in the log."""


_of_process: Counter[str] = Counter()


def refused_here() -> dict[str, int]:
    """Connections that this process refused since it started, by what they asked for. 0 for what it
    listens for and refused none of: the first one is a rise.
    """
    return dict(_of_process)


class Refusals:
    """The refusals of one listener."""

    def __init__(self, kind: str, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`kind`: "kv", "experts" or "mesh"; `what` names the listener in the log."""
        self.num_refused = 0
        _of_process[kind] += 0
        self._kind = kind
        self._what = what
        self._clock = clock
        self._logged_s = -REFUSALS_S
        self._num_logged = 0

    def count(self, why: object) -> None:
        """One more. From any thread: at worst two lines are written instead of one."""
        self.num_refused += 1
        _of_process[self._kind] += 1
        now_s = self._clock()
        if now_s - self._logged_s >= REFUSALS_S:
            self._logged_s, num_logged, self._num_logged = now_s, self._num_logged, self.num_refused
            log.warning(
                "%s refused %d connections: %s", self._what, self.num_refused - num_logged, why
            )


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
    """A non-blocking socket with the frame under way in each direction, and this side of the
    handshake on it.
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
        self.is_closed = False
        self._owner = owner
        self._rx_lock = threading.Lock()
        self._tx_lock = threading.Lock()
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0  # staging[start:end] is read and not parsed.
        self._frame: Frame | None = None
        self._view: memoryview | None = None
        self._tag = bytearray()
        """What has come of the tag behind the frame under way."""
        self._digest: Any = None
        """Takes in the frame under way, where frames are tagged."""
        self._rx_seal: Seal | None = None
        self._tx_seal: Seal | None = None
        self._has_challenged = False
        """The first frame of all is our CHALLENGE."""
        self._done_bytes = 0
        self.is_paused = False
        self._queue: deque[_Outgoing] = deque()

    def challenged(self, nonce: bytes) -> None:
        """The other side's CHALLENGE is here. Raises FrameError."""
        try:
            self.handshake.challenged(nonce)
        except ValueError as error:
            raise FrameError(str(error)) from error
        self._rx_seal = self.handshake.seal(is_outgoing=False)
        self._tx_seal = self.handshake.seal(is_outgoing=True)

    # ---- in ----
    def receive(self, is_hung_up: bool = False) -> None:
        """Take in all that has arrived. `is_hung_up`: the poll said that the end of the stream is
        there.
        """
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
        if self._rx_seal is not None:
            self._digest = self._rx_seal.begin()
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
        num_bytes = self.sock.recv_into(self._staging[self._end :], room)
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
        num_bytes = self.sock.recv_into(into)
        if not num_bytes:
            raise ConnectionResetError("the peer closed it")
        if self._digest is not None:
            self._digest.update(into[:num_bytes])
        self._done_bytes += num_bytes
        return num_bytes < len(into)

    # ---- out ----
    @property
    def is_sending(self) -> bool:
        return bool(self._queue)

    def send(self, head: bytes, payload: memoryview | None = None, token: Any = None) -> bool:
        """Send a frame, or what fits of it; the rest leaves by `flush`. Returns whether it has
        left.

        If not, the owner hears of it with `token`, and the payload must stay as it is until then.
        """
        reason = ""
        is_sent = False
        with self._tx_lock:
            if self.is_closed:
                return False
            views = [memoryview(head)] if payload is None else [memoryview(head), payload]
            # Our CHALLENGE carries no tag, also where the other's is here before ours has left.
            is_plain = self._tx_seal is None or not self._has_challenged
            self._has_challenged = True
            item = _Outgoing(views, payload is not None, is_plain, False, token)
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
        if not item.is_tagged:
            assert self._tx_seal is not None
            item.views.append(memoryview(self._tx_seal.tag(item.views)))
            item.is_tagged = item.is_started = True
        while True:
            num_bytes = self.sock.sendmsg(item.views)
            item.is_started |= num_bytes > 0
            while item.views and num_bytes >= len(item.views[0]):
                num_bytes -= len(item.views.pop(0))
            if not item.views:
                return True
            item.views[0] = item.views[0][num_bytes:]

    def flush(self) -> None:
        """Go on with what is queued: the poll said that there is room."""
        reason = ""
        tokens = []
        # The queue is looked at under the lock: a `send` that finds the socket full this moment is
        # still to queue, and the poll will not report this room again.
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
        """Let go of all memory of others: from now on no payload under way is written to where it
        was going, and what is left of a frame that was begun is sent from a copy. Data not begun is
        dropped.
        """
        with self._rx_lock:
            if self._frame is not None and self._frame.kind == DATA:
                self._view = None
        with self._tx_lock:
            kept: deque[_Outgoing] = deque()
            for item in self._queue:
                if item.is_started and (item.is_data or item.token is not None):
                    rest = b"".join(item.views)
                    kept.append(_Outgoing([memoryview(rest)], False, True, True, None))
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

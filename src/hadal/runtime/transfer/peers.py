"""Direct TCP connections between processes of a run, for KV and expert weights: one protocol, one
server, one client, and their limits.

    connector  magic, nonce ->
               <- magic, nonce, proof       (no answer to a wrong magic)
    its name, proof ->
    ask ->
               <- answer, and the bytes that it announces

Asks (requests) and answers are frames: a length, then msgpack. A connection carries one ask after
another. Independent of the content of asks and answers (runtime/transfer/tcp,
runtime/transfer/experts). core/handshake explains the proofs.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from hadal.comm.mesh.refusals import Refusals
from hadal.core.errors import HadalError
from hadal.core.framing import U32
from hadal.core.handshake import NONCE_BYTES, PROOF_BYTES, TAG_BYTES, Handshake, is_near
from hadal.runtime.worker import lower_priority

log = logging.getLogger(__name__)

SILENCE_S = 2.0
"""A peer that sends nothing, or accepts nothing, for this long is dead or frozen."""
MIN_BYTES_PER_S = 10e6
"""Slowest accepted rate: N bytes may take SILENCE_S + N / MIN_BYTES_PER_S. Any disk is faster."""
SHUN_S = 2.0
"""Time for which a failed peer is not asked, so that other asks to it fail immediately. So a
process waits for silent peers at most half of the time.
"""
IDLE_S = 120.0
"""Connections without asks for this long are closed; a client makes a new one when it needs one."""
TRIES = 3
"""Number of connections tried per ask: an idle one may be closed, and the next may break."""
NIXL_START_S = 6.0
"""Longest silence before the answer to AskNixl: the owner makes its agent at the first such ask,
which takes long on busy cores.
"""
MAX_CONNECTIONS = 128
"""Maximum number of connections that a server serves at a time; more wait for up to SILENCE_S.
Every rank that pulls has one.
"""
MAX_UNPROVEN = 64
"""Maximum number of accepted connections before their handshake is done; one more ends the oldest."""
MAX_FRAME_BYTES = 4 << 20
"""Longest frame. The lease of a million tokens takes a twentieth of it."""
MAX_PIECES = 512
"""Maximum number of pieces of one sendmsg or recvmsg (the kernel takes 1024, IOV_MAX)."""

_MAGIC = b"HADALP01"
_CHALLENGE_BYTES = len(_MAGIC) + NONCE_BYTES
_NAME_BYTES = 128
F = TypeVar("F")
"""Type of a frame, or a union of frame types."""
T = TypeVar("T")


class NotProven(ConnectionError):
    """Failed proof: the other side is not of this deployment, or data was changed on the way."""


class BadPeer(HadalError):
    """Violation of the protocol by the other side."""


class Channel:
    """A socket after the handshake. `name`: the name that the connecting side gave. Every record is
    tagged if the other end is on another host. Methods raise OSError after silence, the deadline or
    an early end, and NotProven.
    """

    def __init__(self, connection: socket.socket, handshake: Handshake, name: str) -> None:
        self.connection = connection
        self.name = name
        self._out = handshake.seal(is_outgoing=True)
        self._in = handshake.seal(is_outgoing=False)

    def send(self, *records: Sequence[memoryview | bytes], deadline_s: float | None = None) -> None:
        """Send records without copying them. `deadline_s`: SILENCE_S from now, unless given."""
        deadline_s = time.monotonic() + SILENCE_S if deadline_s is None else deadline_s
        left: list[memoryview] = []
        for record in records:
            left += [memoryview(piece) for piece in record]
            if self._out is not None:
                left.append(memoryview(self._out.tag(record)))
        while left:
            wait(self.connection, deadline_s, SILENCE_S)
            left = after(left, self.connection.sendmsg(left[:MAX_PIECES]))

    def fill(self, *views: memoryview, deadline_s: float, silence_s: float | None = None) -> None:
        """Receive one record into `views`, in order. `silence_s`: SILENCE_S, unless given."""
        silence_s = SILENCE_S if silence_s is None else silence_s
        if self._in is None and len(views) == 1:
            fill(self.connection, views[0], deadline_s, silence_s)
            return
        tag = memoryview(bytearray(TAG_BYTES if self._in is not None else 0))
        left = [view for view in (*views, tag) if view.nbytes]
        while left:
            wait(self.connection, deadline_s, silence_s)
            count = self.connection.recvmsg_into(left[:MAX_PIECES])[0]
            if not count:
                raise ConnectionResetError("it closed the connection")
            left = after(left, count)
        if self._in is not None and self._in.tag(views) != tag:
            raise NotProven("the received data was changed on its way")

    def send_frame(
        self, frame: msgspec.Struct | None, *views: memoryview, deadline_s: float | None = None
    ) -> None:
        """Send a frame and the bytes that it announces, which are one record."""
        body = msgspec.msgpack.encode(frame)
        records: list[Sequence[memoryview | bytes]] = [(U32.pack(len(body)),), (body,)]
        self.send(*records, *([views] if views else []), deadline_s=deadline_s)

    def receive_frame(
        self,
        decoder: msgspec.msgpack.Decoder[F],
        deadline_s: float,
        silence_s: float | None = None,
    ) -> F:
        """Receive a frame that `decoder` can read. `silence_s`: longest silence before its first
        byte. Raises BadPeer, too.
        """
        head = bytearray(U32.size)
        self.fill(memoryview(head), deadline_s=deadline_s, silence_s=silence_s)
        (length,) = U32.unpack(head)
        if length > MAX_FRAME_BYTES:
            raise BadPeer(f"it announces a frame of {length} bytes, which is above the limit")
        body = bytearray(length)
        self.fill(memoryview(body), deadline_s=deadline_s)
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise BadPeer(f"its frame cannot be decoded ({error})") from error

    def close(self) -> None:
        self.connection.close()


def _handshake(
    connection: socket.socket, key: bytes, *, is_connector: bool
) -> tuple[Handshake, bytes]:
    """Return one side of a new connection's handshake, and its challenge."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host, port = connection.getpeername()[:2]
    nonce = secrets.token_bytes(NONCE_BYTES)
    handshake = Handshake(
        key,
        nonce,
        is_connector=is_connector,
        port=port if is_connector else connection.getsockname()[1],
        is_sealed=not is_near(host),
    )
    return handshake, _MAGIC + nonce


def open_channel(host: str, port: int, key: bytes, name: str, deadline_s: float) -> Channel:
    """Connect as `name`, and do the handshake as the connecting side. Raises OSError."""
    timeout_s = min(SILENCE_S, max(0.001, deadline_s - time.monotonic()))
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        handshake, challenge = _handshake(connection, key, is_connector=True)
        connection.sendall(challenge)
        _take_challenge(connection, handshake, deadline_s)
        if not handshake.is_proof(_take(connection, PROOF_BYTES, deadline_s)):
            raise NotProven("it does not hold this deployment's secret")
        claim = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        connection.sendall(claim + handshake.proof(claim))
    except OSError:
        connection.close()
        raise
    return Channel(connection, handshake, "")


def accept_channel(connection: socket.socket, key: bytes) -> Channel:
    """Accept a handshake within SILENCE_S. Raises OSError; the caller closes the connection."""
    deadline_s = time.monotonic() + SILENCE_S
    handshake, challenge = _handshake(connection, key, is_connector=False)
    _take_challenge(connection, handshake, deadline_s)
    connection.sendall(challenge + handshake.proof())
    name = _take(connection, _NAME_BYTES, deadline_s)
    if not handshake.is_proof(_take(connection, PROOF_BYTES, deadline_s), name):
        raise NotProven("it does not hold this deployment's secret")
    return Channel(connection, handshake, name.rstrip(b"\0").decode("utf-8", "replace"))


class PeerServer(Generic[F]):
    """Server that answers peers after their handshake, from `start` until closed, on `port`.

    One thread accepts. Each connection has its own thread, which ends with it: when the peer closes
    or dies, sends unreadable data, or is silent for IDLE_S between asks or SILENCE_S within an ask.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        kind: str,
        what: str,
        asks: msgspec.msgpack.Decoder[F],
        answer: Callable[[Channel, F], None],
        *,
        greet: Callable[[Channel], None] = lambda channel: None,
        in_background: bool = False,
    ) -> None:
        """`kind` and `what`: names of the served data, as in Refusals. `answer` is called with
        every ask, and `greet` before the first one, both from the connection's thread.
        `in_background`: the threads run with a lower priority.
        """
        self.refusals = Refusals(kind, what)
        self.closing = threading.Event()
        """Set once running answers have to be broken off."""
        self._key = key
        self._kind = kind
        self._asks = asks
        self._answer = answer
        self._greet = greet
        self._in_background = in_background
        self._listener = socket.create_server((host, 0), backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._serving_limit = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._connection_to_thread: dict[socket.socket, threading.Thread] = {}
        self._unproven: dict[socket.socket, None] = {}
        """Connections before the end of their handshake, oldest first."""
        self._thread = threading.Thread(target=self._accept, name=f"{kind}-server", daemon=True)

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._connection_to_thread)

    def start(self) -> None:
        """Begin to accept: from now on `answer` and `greet` are called."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Break off running answers and free the port. False if a thread outlasts `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self.closing.set()
            connection_to_thread = dict(self._connection_to_thread)
        shut(self._listener)  # Wakes the thread that accepts.
        for connection in connection_to_thread:
            shut(connection)
        threads = (self._thread, *connection_to_thread.values())
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._listener.close()
        return not any(thread.is_alive() for thread in threads)

    # ---- in the thread that accepts ----
    def _accept(self) -> None:
        if self._in_background:
            lower_priority()  # The threads that it starts inherit the priority.
        while not self.closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # The peer is gone, no descriptor is left, or this closes.
                if not self.closing.is_set():
                    log.warning("a connection for %s was refused: %s", self._kind, error)
                    self.closing.wait(SILENCE_S)
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._talk, args=(connection,), name=f"{self._kind}-send", daemon=True
        )
        with self._lock:
            if self.closing.is_set():
                connection.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # No more threads now: a later connection may get one.
                log.warning("a connection for %s was refused: %s", self._kind, error)
                connection.close()
                return
            self._connection_to_thread[connection] = thread
            self._unproven[connection] = None
            oldest = next(iter(self._unproven)) if len(self._unproven) > MAX_UNPROVEN else None
        if oldest is not None:
            shut(oldest)  # Connections without a handshake must not keep others out.

    # ---- in a connection's thread ----
    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                channel = self._prove(connection)
                if channel is not None:
                    self._serve(channel)
        except NotProven as error:  # Data after the handshake was changed on its way.
            self.refusals.count(error)
        except (OSError, BadPeer) as error:  # Includes the TimeoutError of a deadline.
            log.debug("a peer that asked for %s is gone: %r", self._kind, error)
        except Exception:
            log.exception("%s could not be sent", self._kind)  # The peer gets no answer.
        finally:
            with self._lock:
                self._connection_to_thread.pop(connection)

    def _prove(self, connection: socket.socket) -> Channel | None:
        try:
            return accept_channel(connection, self._key)
        except OSError as error:
            # Silence counts as well: it occupied a connection.
            if not self.closing.is_set():
                self.refusals.count(str(error) or type(error).__name__)
            return None
        finally:
            with self._lock:
                self._unproven.pop(connection)

    def _serve(self, channel: Channel) -> None:
        # The limit counts only connections after their handshake.
        if not self._serving_limit.acquire(timeout=SILENCE_S):
            log.warning(
                "a connection for %s was refused: %d connections are served already",
                self._kind,
                MAX_CONNECTIONS,
            )
            return
        try:
            self._greet(channel)
            while not self.closing.is_set():
                ask = channel.receive_frame(self._asks, time.monotonic() + IDLE_S, IDLE_S)
                self._answer(channel, ask)
        finally:
            self._serving_limit.release()


class PeerLink:
    """Connection to one server, from the first ask until closed. For one thread at a time."""

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        name: str = "",
        greeted: Callable[[Channel, float], None] = lambda channel, deadline_s: None,
    ) -> None:
        """`name`: name of this process. `greeted` is called with a new channel and the deadline."""
        self._host = host
        self._port = port
        self._key = key
        self._name = name
        self._greeted = greeted
        self._channel: Channel | None = None
        self._shunned_until_s = 0.0

    @property
    def is_shunned(self) -> bool:
        return time.monotonic() < self._shunned_until_s

    def shun(self) -> None:
        """Note that the peer failed: it is not to be asked for SHUN_S."""
        self._shunned_until_s = time.monotonic() + SHUN_S

    def ask(self, use: Callable[[Channel], T], deadline_s: float, tries: int = TRIES) -> T:
        """Return the result of `use` with the channel; try again over a new channel if the
        connection breaks. Any exception closes the link. Raises OSError, and what `use` and
        `greeted` raise.
        """
        for number in range(tries):
            try:
                return use(self._connect(deadline_s))
            except ConnectionError as error:
                self.close()
                if number == tries - 1 or isinstance(error, ConnectionRefusedError | NotProven):
                    raise
                log.debug("%s:%d: %s", self._host, self._port, error)
            except BaseException:
                self.close()  # An exchange is half done.
                raise
        raise AssertionError("unreachable")

    def interrupt(self) -> None:
        """Make the ask under way, if any, fail soon. From any thread."""
        channel = self._channel
        if channel is not None:
            shut(channel.connection)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self, deadline_s: float) -> Channel:
        if self._channel is None:
            channel = open_channel(self._host, self._port, self._key, self._name, deadline_s)
            try:
                self._greeted(channel, deadline_s)
            except BaseException:
                channel.close()
                raise
            self._channel = channel
        return self._channel


def deadline_of(num_bytes: int) -> float:
    """Return the time.monotonic by which a peer must have sent `num_bytes`, beginning now."""
    return time.monotonic() + SILENCE_S + num_bytes / MIN_BYTES_PER_S


def fill(connection: socket.socket, view: memoryview, deadline_s: float, silence_s: float) -> None:
    """Receive bytes until `view` is full. Raises OSError after silence of `silence_s`, at the
    deadline, or at an early end.
    """
    while view:
        wait(connection, deadline_s, silence_s)
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("it closed the connection")
        view = view[count:]


def wait(connection: socket.socket, deadline_s: float, silence_s: float) -> None:
    """Set the timeout of the next call on the connection: `silence_s`, but not beyond the deadline.
    Raises TimeoutError if the deadline is over.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it did not send or read all in time")
    connection.settimeout(min(silence_s, left_s))


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of `views` after the first `count` bytes."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    left = views[done:]
    if count:
        left[0] = left[0][count:]
    return left


def shut(connection: socket.socket) -> None:
    """Make every call on the connection, in any thread, end now."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("the connection was closed already: %s", error)


def _take(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Receive `num_bytes` bytes by the deadline, with silences of at most SILENCE_S."""
    data = bytearray(num_bytes)
    fill(connection, memoryview(data), deadline_s, SILENCE_S)
    return bytes(data)


def _take_challenge(connection: socket.socket, handshake: Handshake, deadline_s: float) -> None:
    challenge = _take(connection, _CHALLENGE_BYTES, deadline_s)
    if not challenge.startswith(_MAGIC):
        raise NotProven("it does not use this protocol")
    try:
        handshake.challenged(challenge[len(_MAGIC) :])
    except ValueError as error:
        raise NotProven(str(error)) from error

"""What direct connections between processes of a run have in common: proving themselves, and
sending and receiving exactly so many bytes within a deadline.

    connector  magic, nonce ->
               <- magic, nonce, proof                     (silence where the other is not of this deployment)
    its name, proof ->

Knows neither what is asked nor what is answered (runtime/transfer/experts,
runtime/transfer/frames). Why a proof is one: core/handshake.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Sequence

from hadal.core.handshake import NONCE_BYTES, PROOF_BYTES, TAG_BYTES, Handshake, is_near

MAX_UNPROVEN = 64
"""Accepted connections that have not proven themselves yet; one more ends the oldest of them."""
MAX_PIECES = 512
"""Most pieces of one sendmsg or recvmsg (the kernel takes 1024, IOV_MAX)."""

_MAGIC = b"HADALP01"
CHALLENGE_BYTES = len(_MAGIC) + NONCE_BYTES
ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
_NAME = struct.Struct("<128s")
CLAIM_BYTES = _NAME.size + PROOF_BYTES


class NotProven(ConnectionError):
    """The other side is not of this deployment, or something on the way changed what it said."""


class Channel:
    """A socket whose other end proved itself; `name` is what it calls itself. Every record is
    tagged if the other end is on another host. Raises OSError: silence for `silence_s`, the
    deadline, an end in the middle, NotProven.
    """

    def __init__(self, connection: socket.socket, handshake: Handshake, name: str) -> None:
        self.connection = connection
        self.name = name
        self._out = handshake.seal(is_outgoing=True)
        self._in = handshake.seal(is_outgoing=False)

    def send(
        self, *records: Sequence[memoryview | bytes], deadline_s: float, silence_s: float
    ) -> None:
        """Send records, straight from where they lie."""
        left: list[memoryview] = []
        for record in records:
            left += [memoryview(piece) for piece in record]
            if self._out is not None:
                left.append(memoryview(self._out.tag(record)))
        while left:
            wait(self.connection, deadline_s, silence_s)
            left = after(left, self.connection.sendmsg(left[:MAX_PIECES]))

    def fill(self, *views: memoryview, deadline_s: float, silence_s: float) -> None:
        """Receive one record into `views`, in order."""
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
            raise NotProven("what came was changed on its way")

    def close(self) -> None:
        self.connection.close()


def connecting(connection: socket.socket, key: bytes) -> tuple[Handshake, bytes]:
    """The connector's side of a connection, and what it says first."""
    host, port = connection.getpeername()[:2]
    nonce = secrets.token_bytes(NONCE_BYTES)
    handshake = Handshake(key, nonce, is_connector=True, port=port, is_sealed=not is_near(host))
    return handshake, _MAGIC + nonce


def answered(handshake: Handshake, answer: bytes, name: str) -> bytes:
    """Check the acceptor's answer; what the connector, called `name`, says last. Raises
    NotProven.
    """
    challenge, proof = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
    _challenged(handshake, challenge)
    if not handshake.is_proof(proof):
        raise NotProven("it does not hold this deployment's secret")
    claim = _NAME.pack(name.encode())
    return claim + handshake.proof(claim)


def accepting(connection: socket.socket, key: bytes, challenge: bytes) -> tuple[Handshake, bytes]:
    """The acceptor's side, once the connector's challenge is here, and its answer. Raises
    NotProven.
    """
    host, port = connection.getpeername()[0], connection.getsockname()[1]
    nonce = secrets.token_bytes(NONCE_BYTES)
    handshake = Handshake(key, nonce, is_connector=False, port=port, is_sealed=not is_near(host))
    _challenged(handshake, challenge)
    return handshake, _MAGIC + nonce + handshake.proof()


def claimed(handshake: Handshake, claim: bytes) -> str:
    """The connector's name, once its last word is here. Raises NotProven."""
    name, proof = claim[: _NAME.size], claim[_NAME.size :]
    if not handshake.is_proof(proof, name):
        raise NotProven("it does not hold this deployment's secret")
    return name.rstrip(b"\0").decode("utf-8", "replace")


def open_channel(
    host: str, port: int, key: bytes, name: str, deadline_s: float, silence_s: float
) -> Channel:
    """Connect, and prove to each other who is who. Raises OSError."""
    timeout_s = min(silence_s, max(0.001, deadline_s - time.monotonic()))
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake, challenge = connecting(connection, key)
        connection.sendall(challenge)
        answer = bytearray(ANSWER_BYTES)
        fill(connection, memoryview(answer), deadline_s, silence_s)
        connection.sendall(answered(handshake, bytes(answer), name))
    except OSError:
        connection.close()
        raise
    return Channel(connection, handshake, "")


def accept_channel(
    connection: socket.socket, key: bytes, deadline_s: float, silence_s: float
) -> Channel:
    """The same from the acceptor's side. Raises OSError; the caller closes the connection."""
    challenge, claim = bytearray(CHALLENGE_BYTES), bytearray(CLAIM_BYTES)
    fill(connection, memoryview(challenge), deadline_s, silence_s)
    handshake, answer = accepting(connection, key, bytes(challenge))
    connection.sendall(answer)
    fill(connection, memoryview(claim), deadline_s, silence_s)
    return Channel(connection, handshake, claimed(handshake, bytes(claim)))


def fill(connection: socket.socket, view: memoryview, deadline_s: float, silence_s: float) -> None:
    """Receive exactly these bytes. Raises OSError: silence for `silence_s`, the deadline, or an end
    in the middle.
    """
    while view:
        wait(connection, deadline_s, silence_s)
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("it closed the connection")
        view = view[count:]


def wait(connection: socket.socket, deadline_s: float, silence_s: float) -> None:
    """Let the next call on the connection wait for `silence_s`, and not beyond the deadline. Raises
    TimeoutError.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it is too slow")
    connection.settimeout(min(silence_s, left_s))


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` once the first `count` bytes are done."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    left = views[done:]
    if count:
        left[0] = left[0][count:]
    return left


def _challenged(handshake: Handshake, challenge: bytes) -> None:
    if not challenge.startswith(_MAGIC):
        raise NotProven("it does not speak this protocol")
    try:
        handshake.challenged(challenge[len(_MAGIC) :])
    except ValueError as error:
        raise NotProven(str(error)) from error

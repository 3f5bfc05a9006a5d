"""The bytes between two ranks of the TCP mesh: a header of 24 bytes, then the payload.

    HELLO   who I am, whom I take you for, and the generation I am in: first on a connection, and at every generation
    DATA    one rank's part of one exchange
    ABORT   this generation failed for me: who is lost, and why

Knows no sockets and keeps no state. What a peer sent is checked here and refused with FrameError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hadal.core.errors import HadalError

HELLO, DATA, ABORT = 1, 2, 3

MAX_PAYLOAD_BYTES = 1 << 31
MAX_CONTROL_BYTES = 4096
"""Of a HELLO or an ABORT."""
MAX_REASON_BYTES = 1000
MAX_LOST_RANKS = 1000

_MAGIC = b"HdM1"
_HEADER = struct.Struct("<4sIIIQ")
HEADER_BYTES = _HEADER.size


class FrameError(HadalError):
    """What arrived is not this protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header."""

    kind: int
    generation: int
    sequence: int
    """Of a DATA frame: which exchange of its generation."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks, and to whom it believes to speak."""

    rank: int
    epoch: str
    to_rank: int
    to_epoch: str


def pack_header(kind: int, generation: int, sequence: int, num_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, kind, generation, sequence, num_bytes)


def unpack_header(data: memoryview, at: int) -> Frame:
    """Read the header that begins at `at`. Raises FrameError."""
    magic, kind, generation, sequence, num_bytes = _HEADER.unpack_from(data, at)
    if magic != _MAGIC or kind not in (HELLO, DATA, ABORT):
        raise FrameError(f"no frame of the mesh: {magic!r}, kind {kind}")
    limit = MAX_PAYLOAD_BYTES if kind == DATA else MAX_CONTROL_BYTES
    if num_bytes > limit:
        raise FrameError(f"a frame of {num_bytes} bytes; {limit} is the limit")
    return Frame(kind, generation, sequence, num_bytes)


def pack_hello(generation: int, hello: Hello) -> bytes:
    """A whole HELLO frame."""
    body = f"{hello.rank} {hello.to_rank}\n{hello.epoch}\n{hello.to_epoch}".encode()
    return pack_header(HELLO, generation, 0, len(body)) + body


def unpack_hello(body: bytes) -> Hello:
    """Raises FrameError."""
    try:
        ranks, epoch, to_epoch = body.decode().split("\n")
        rank, to_rank = map(int, ranks.split(" "))
    except ValueError as error:
        raise FrameError("a malformed HELLO") from error
    return Hello(rank, epoch, to_rank, to_epoch)


def pack_abort(generation: int, ranks: tuple[int, ...], reason: str) -> bytes:
    """A whole ABORT frame."""
    text = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    body = f"{' '.join(map(str, ranks[:MAX_LOST_RANKS]))}\n{text}".encode()[:MAX_CONTROL_BYTES]
    return pack_header(ABORT, generation, 0, len(body)) + body


def unpack_abort(body: bytes) -> tuple[tuple[int, ...], str]:
    """Return the lost ranks and the reason. Raises FrameError."""
    try:
        ranks, _, reason = body.decode(errors="replace").partition("\n")
        return tuple(map(int, ranks.split())), reason
    except ValueError as error:
        raise FrameError("a malformed ABORT") from error

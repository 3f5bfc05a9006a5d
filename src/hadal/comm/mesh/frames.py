"""Frames between two ranks of the TCP mesh: a header of 24 bytes, then the payload.

    CHALLENGE  a nonce, first on a connection
    HELLO      the sender's identity, the expected receiver's and the sender's formation, with a proof: sent once the
               other's CHALLENGE has arrived, and at every formation
    DATA       one rank's part of one exchange
    ABORT      the sender's formation failed: lost ranks and the reason

These are not the frames of runtime/transfer/peers: its reader waits for a body and then decodes it. A
link never waits, finds several headers in one read, and needs only a header to place a payload.

If packets leave the host, a tag follows every frame after the CHALLENGE (core/handshake). Does not
depend on sockets and has no state. Peers' data are checked here and refused with FrameError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hadal.core.errors import HadalError
from hadal.core.handshake import PROOF_BYTES

HELLO, DATA, ABORT, CHALLENGE = 1, 2, 3, 4
MAX_PAYLOAD_BYTES = 1 << 31
MAX_CONTROL_BYTES = 4096
"""Maximum number of payload bytes of any frame but DATA."""
MAX_REASON_BYTES = 1000
MAX_LOST_RANKS = 1000
_MAGIC = b"HdM2"
_HEADER = struct.Struct("<4sIIIQ")
HEADER_BYTES = _HEADER.size


class FrameError(HadalError):
    """Received bytes do not follow this protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Header of a frame."""

    kind: int
    formation: int
    sequence: int
    """Sequence number of a DATA frame's exchange in its formation."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Identity of the sender, and of the receiver that it expects."""

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
        raise FrameError(f"not a frame of the mesh: {magic!r}, kind {kind}")
    limit = MAX_PAYLOAD_BYTES if kind == DATA else MAX_CONTROL_BYTES
    if num_bytes > limit:
        raise FrameError(f"a frame of {num_bytes} bytes; {limit} is the limit")
    return Frame(kind, formation, sequence, num_bytes)


def pack_challenge(nonce: bytes) -> bytes:
    """Return a whole CHALLENGE frame."""
    return pack_header(CHALLENGE, 0, 0, len(nonce)) + nonce


def hello_claim(formation: int, hello: Hello) -> bytes:
    """Return the text of a HELLO, as it is proven and sent."""
    return f"{formation} {hello.rank} {hello.to_rank}\n{hello.epoch}\n{hello.to_epoch}".encode()


def pack_hello(formation: int, claim: bytes, proof: bytes) -> bytes:
    """Return a whole HELLO frame; `claim`: its hello_claim."""
    return pack_header(HELLO, formation, 0, len(proof) + len(claim)) + proof + claim


def unpack_hello(formation: int, body: bytes) -> tuple[Hello, bytes, bytes]:
    """Return (hello, claim, proof); the caller must check the proof. Raises FrameError."""
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
    """Return a whole ABORT frame."""
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

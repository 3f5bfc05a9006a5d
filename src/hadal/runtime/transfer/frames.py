"""What a puller of KV and the owner of a pool say to one another over TCP.

    both prove themselves (runtime/transfer/peers)
             <-  About
    Ask      block ids, versions, which chunks  ->
             <-  for every chunk: _CHUNK head, bytes    (chunk i: blocks [i*n, (i+1)*n), n = blocks_per_chunk)
             <-  END once all versions were looked at again after the last byte, or FREED
    AskNixl  ->
             <-  AboutNixl

A connection carries one ask after another; all but the heads of chunks is msgpack after its length.
Knows neither pools nor who asks.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

import msgspec
import xxhash

from hadal.core.errors import HadalError
from hadal.runtime.transfer.grants import Grant
from hadal.runtime.transfer.peers import Channel, open_channel
from hadal.runtime.transfer.pool import PoolError

PURPOSE = "kv 2"
"""Purpose of the key (core/handshake.key_of)."""
SILENCE_S = 2.0
"""A peer that says nothing, or takes nothing, for this long is dead or frozen."""
CHUNK_BYTES = 1 << 20
"""Sent under one checksum and sent again by itself; one block at least."""
MAX_FRAME_BYTES = 4 << 20
"""A lease of a million tokens takes a twentieth."""
CHUNK, END, FREED, REFUSED = range(4)
"""What a chunk's head says; the last three have no bytes and end the answer."""

_LENGTH = struct.Struct("<I")
_CHUNK = struct.Struct("<B3xIQQ")
"""kind, chunk, number of bytes, their XXH3"""


class BadPeer(HadalError):
    """What came is not what this protocol says."""


class About(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A pool, as its owner's server describes it."""

    name: str
    birth: str
    shape: tuple[int, int, int, int]
    dtype: str
    has_nixl: bool


class PullChunks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send these chunks of the leased blocks."""

    block_ids: tuple[int, ...]
    versions: tuple[int, ...]
    chunks: tuple[int, ...]
    grant: Grant
    """That this lease is this reader's (runtime/transfer/grants)."""


class AskNixl(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How can the pool be read with NIXL?"""


class AboutNixl(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The owner's agent, and where its pool lies in its memory; `error`: why there is none."""

    agent: bytes = b""
    cache: int = 0
    versions: int = 0
    error: str = ""


Frame = About | PullChunks | AskNixl | AboutNixl
_decoder = msgspec.msgpack.Decoder(Frame)


def blocks_per_chunk(block_bytes: int) -> int:
    return max(1, CHUNK_BYTES // block_bytes)


def checksum(views: Sequence[memoryview]) -> int:
    """XXH3 of the bytes in order."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def send_frame(channel: Channel, frame: Frame, deadline_s: float | None = None) -> None:
    """Raises OSError."""
    body = msgspec.msgpack.encode(frame)
    deadline_s = time.monotonic() + SILENCE_S if deadline_s is None else deadline_s
    channel.send((_LENGTH.pack(len(body)),), (body,), deadline_s=deadline_s, silence_s=SILENCE_S)


def receive_frame(channel: Channel, deadline_s: float, silence_s: float = SILENCE_S) -> Frame:
    """Raises OSError, BadPeer."""
    head = bytearray(_LENGTH.size)
    channel.fill(memoryview(head), deadline_s=deadline_s, silence_s=silence_s)
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise BadPeer(f"it announces {length} bytes")
    body = bytearray(length)
    channel.fill(memoryview(body), deadline_s=deadline_s, silence_s=SILENCE_S)
    try:
        frame: Frame = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BadPeer(f"what it says cannot be read ({error})") from error
    return frame


def send_chunk(
    channel: Channel,
    kind: int,
    deadline_s: float,
    chunk: int = 0,
    views: Sequence[memoryview] = (),
    digest: int = 0,
) -> None:
    """Head and bytes, straight from where they lie. Raises OSError."""
    head = _CHUNK.pack(kind, chunk, sum(view.nbytes for view in views), digest)
    records: list[Sequence[memoryview | bytes]] = [(head,), views] if views else [(head,)]
    channel.send(*records, deadline_s=deadline_s, silence_s=SILENCE_S)


def receive_head(channel: Channel, deadline_s: float) -> tuple[int, int, int, int]:
    """(kind, chunk, number of bytes, their XXH3). Raises OSError."""
    head = bytearray(_CHUNK.size)
    channel.fill(memoryview(head), deadline_s=deadline_s, silence_s=SILENCE_S)
    kind, chunk, num_bytes, digest = _CHUNK.unpack(head)
    return kind, chunk, num_bytes, digest


def receive_bytes(channel: Channel, views: Sequence[memoryview], deadline_s: float) -> None:
    """Fill the views in order. Raises OSError."""
    channel.fill(*views, deadline_s=deadline_s, silence_s=SILENCE_S)


def connect(
    host: str, port: int, key: bytes, name: str, deadline_s: float
) -> tuple[Channel, About]:
    """A channel that asks can go over, and whose pool is there; `name`: who asks. Raises OSError,
    BadPeer.
    """
    channel = open_channel(host, port, key, name, deadline_s, SILENCE_S)
    try:
        about = receive_frame(channel, deadline_s)
        if not isinstance(about, About):
            raise BadPeer(f"it begins with {type(about).__name__}")
        return channel, about
    except (OSError, BadPeer):
        channel.close()
        raise


def check_about(about: About, name: str, birth: str) -> None:
    """Raise PoolError if the address is another pool's by now."""
    if (about.name, about.birth) != (name, birth):
        raise PoolError(f"KV pool {name} is gone; {about.name} is served in its place")

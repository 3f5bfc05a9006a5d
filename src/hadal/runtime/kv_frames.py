"""What a puller of KV and the owner of a pool say to one another over TCP.

    hello    magic, version, key        ->
             <-  magic, version                         (silence where the key is another run's)
             <-  About
    Ask      block ids, generations, which chunks  ->
             <-  for every chunk: _CHUNK head, bytes    (chunk i: blocks [i*n, (i+1)*n), n = blocks_per_chunk)
             <-  END once all generations were looked at again after the last byte, or FREED
    AskNixl  ->
             <-  AboutNixl

A connection carries one ask after another; all but the hello and the heads of chunks is msgpack after its length.
Knows neither pools nor who asks.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Sequence

import msgspec
import xxhash

from hadal.core.errors import HadalError
from hadal.runtime.kv_pool import PoolError
from hadal.runtime.peers import fill, wait

VERSION = 1
PURPOSE = "kv 1"
"""Of the key (runtime/peers.key_of)."""
SILENCE_S = 2.0
"""A peer that says nothing, or takes nothing, for this long is dead or frozen."""
CHUNK_BYTES = 1 << 20
"""Sent under one checksum and sent again by itself; one block at least."""
MAX_FRAME_BYTES = 4 << 20
"""A lease of a million tokens takes a twentieth."""
MAX_PIECES = 512
"""Of one sendmsg or recvmsg (the kernel takes 1024, IOV_MAX)."""
CHUNK, END, FREED, REFUSED = range(4)
"""What a chunk's head says; the last three have no bytes and end the answer."""

_MAGIC = b"HADALKVT"
_HELLO = struct.Struct("<8sH16s")
_ANSWER = struct.Struct("<8sH")
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


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send these chunks of the leased blocks."""

    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    chunks: tuple[int, ...]


class AskNixl(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How can the pool be read with NIXL?"""


class AboutNixl(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The owner's agent, and where its pool lies in its memory; `error`: why there is none."""

    agent: bytes = b""
    cache: int = 0
    generations: int = 0
    error: str = ""


Frame = About | Ask | AskNixl | AboutNixl
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


def say_hello(connection: socket.socket, key: bytes, deadline_s: float) -> None:
    """The puller's side. Raises OSError, BadPeer."""
    connection.sendall(_HELLO.pack(_MAGIC, VERSION, key))
    answer = bytearray(_ANSWER.size)
    fill(connection, memoryview(answer), deadline_s, SILENCE_S)
    magic, version = _ANSWER.unpack(answer)
    if magic != _MAGIC:
        raise BadPeer("it is not the server of a KV pool")
    if version != VERSION:
        raise BadPeer(f"it speaks version {version} of the hand-over, not {VERSION}")


def hear_hello(connection: socket.socket, key: bytes, deadline_s: float) -> bool:
    """The owner's side. False: the other is none of this run and gets no answer, or no more than the version."""
    hello = bytearray(_HELLO.size)
    fill(connection, memoryview(hello), deadline_s, SILENCE_S)
    magic, version, found = _HELLO.unpack(hello)
    if magic != _MAGIC or not hmac.compare_digest(found, key):
        return False
    connection.sendall(_ANSWER.pack(_MAGIC, VERSION))
    return bool(version == VERSION)


def send_frame(connection: socket.socket, frame: Frame) -> None:
    body = msgspec.msgpack.encode(frame)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(connection: socket.socket, deadline_s: float, silence_s: float = SILENCE_S) -> Frame:
    """Raises OSError, BadPeer."""
    head = bytearray(_LENGTH.size)
    fill(connection, memoryview(head), deadline_s, silence_s)
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise BadPeer(f"it announces {length} bytes")
    body = bytearray(length)
    fill(connection, memoryview(body), deadline_s, SILENCE_S)
    try:
        frame: Frame = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BadPeer(f"what it says cannot be read ({error})") from error
    return frame


def send_chunk(
    connection: socket.socket, kind: int, deadline_s: float, chunk: int = 0, views: Sequence[memoryview] = (),
    digest: int = 0,
) -> None:  # fmt: skip
    """Head and bytes, straight from where they lie. Raises OSError."""
    head = _CHUNK.pack(kind, chunk, sum(view.nbytes for view in views), digest)
    left = [memoryview(head), *views]
    while left:
        wait(connection, deadline_s, SILENCE_S)
        left = _after(left, connection.sendmsg(left[:MAX_PIECES]))


def receive_head(connection: socket.socket, deadline_s: float) -> tuple[int, int, int, int]:
    """(kind, chunk, number of bytes, their XXH3). Raises OSError."""
    head = bytearray(_CHUNK.size)
    fill(connection, memoryview(head), deadline_s, SILENCE_S)
    kind, chunk, num_bytes, digest = _CHUNK.unpack(head)
    return kind, chunk, num_bytes, digest


def receive_bytes(connection: socket.socket, views: Sequence[memoryview], deadline_s: float) -> None:
    """Fill the views in order. Raises OSError."""
    left = list(views)
    while left:
        wait(connection, deadline_s, SILENCE_S)
        count = connection.recvmsg_into(left[:MAX_PIECES])[0]
        if not count:
            raise ConnectionResetError("it closed the connection")
        left = _after(left, count)


def connect(host: str, port: int, key: bytes, deadline_s: float) -> tuple[socket.socket, About]:
    """A connection that asks can go over, and whose pool is there. Raises OSError, BadPeer."""
    timeout_s = min(SILENCE_S, max(0.001, deadline_s - time.monotonic()))
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        say_hello(connection, key, deadline_s)
        about = receive_frame(connection, deadline_s)
        if not isinstance(about, About):
            raise BadPeer(f"it begins with {type(about).__name__}")
        return connection, about
    except (OSError, BadPeer):
        connection.close()
        raise


def check_about(about: About, name: str, birth: str) -> None:
    """Raise PoolError if the address is another pool's by now."""
    if (about.name, about.birth) != (name, birth):
        raise PoolError(f"KV pool {name} is gone; {about.name} is served in its place")


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left once the first `count` bytes are done."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    left = views[done:]
    if count:
        left[0] = left[0][count:]
    return left

"""The Wire seam's messages, live: pyzmq PUSH/PULL over Unix sockets in the run folder, msgpack
inside.

A process owns one PULL socket at `<folder>/<name>.sock`; every peer that sends to it has one PUSH
socket. Nothing here blocks or retries: a message to a process that is absent or does not read is
dropped and counted, and the roles' deadlines recover. Knows nothing of what messages mean.

What a restart must not do is hand a successor what was meant for the dead, or let the dead speak
after the successor:

- PUSH sockets never reconnect. A sender looks at the socket file's identity before it sends; a new
  file is a new process, so the old socket goes, with its queue. The file appears by rename once it
  listens, so seeing it is enough.
- Every frame carries its sender's name and start time. Once a later start was heard, earlier ones
  are dropped.

One thread at a time may use a wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import msgspec
import zmq

from hadal.core.errors import ConfigError
from hadal.core.messages import AnyMessage
from hadal.runtime.transfer.grants import Grants

MAX_QUEUED = 4096
"""Messages held for one peer that does not read. A decode step is one message, so this is minutes
of steps.
"""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens is 5 MB; anything beyond is not ours."""
MAX_BATCH = 256
"""Messages returned at once, so that timers are looked at in between."""
LINGER_MS = 200
"""How long closing waits for what is queued."""
_MAX_PATH = 107
"""sockaddr_un.sun_path less its final zero (unix(7))."""


class _Peer:
    """One PUSH socket and the identity of the socket file it was connected to."""

    def __init__(self, socket: zmq.Socket[bytes], identity: tuple[int, int]) -> None:
        self.socket = socket
        self.identity = identity


class ZmqWire:
    """Messages to and from the processes of one run folder. `counts` tells what became of them."""

    def __init__(self, name: str, folder: Path, grants: Grants | None = None) -> None:
        """Own the name `name`; `grants` go beside the messages that hand leases on. Raises
        ConfigError if the folder's path is too long for a Unix socket.
        """
        self.name = name
        self.counts: Counter[str] = Counter()
        """"sent", "received", and dropped: "absent", "full", "malformed", "stale"."""
        self._grants = grants
        self._folder = folder
        self._path = socket_path(folder, name)
        started_ns = time.monotonic_ns()  # Comparable between the processes of a host.
        self._header = msgspec.msgpack.encode((name, started_ns))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
        self._header_decoder = msgspec.msgpack.Decoder(tuple[str, int])
        self._started_ns_of: dict[str, int] = {}
        self._peers: dict[str, _Peer] = {}
        self._context = zmq.Context(io_threads=1)
        self._pull: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._pull.set(zmq.RCVHWM, MAX_QUEUED)
        self._pull.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        unborn = socket_path(folder, f"{name}.new")
        with contextlib.suppress(FileNotFoundError):
            unborn.unlink()
        self._pull.bind(f"ipc://{unborn}")
        unborn.rename(self._path)
        self._identity = _identity(self._path)
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)

    def send(self, to: str, message: AnyMessage) -> None:
        """Queue the message for `to`; never waits. What cannot be queued is dropped and counted."""
        socket = self._socket_to(to)
        if socket is None:
            self.counts["absent"] += 1
            return
        try:
            grant = b"" if self._grants is None else self._grants.to(to, message)
            socket.send_multipart((self._header, self._encoder.encode(message), grant), zmq.NOBLOCK)
        except zmq.Again:
            self.counts["full"] += 1
            return
        self.counts["sent"] += 1

    def wake_on(self, fd: int) -> None:
        """Let `receive` return early when this file descriptor is readable (an eventfd, a signal's
        pipe).
        """
        self._poller.register(fd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[AnyMessage]:
        """Return what has come, at most MAX_BATCH; wait up to `timeout_s` for the first or a
        `wake_on` descriptor.
        """
        messages = self._drain()
        if messages or timeout_s <= 0:
            return messages
        # Rounded up: rounded down, the last millisecond before a timer would be spent spinning.
        self._poller.poll(int(timeout_s * 1000) + 1)
        return self._drain()

    async def receive_async(self, timeout_s: float = 1.0) -> list[AnyMessage]:
        """`receive`, in an asyncio loop. It may return none before the time is over: the descriptor
        becomes readable for more than messages.
        """
        messages = self._drain()
        if messages:
            return messages
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        # zmq's descriptor tells of new messages only once all old ones were taken, which _drain
        # just did.
        descriptor = self._pull.FD
        loop.add_reader(descriptor, _resolve, readable)
        try:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: a cancellation that comes with a message is lost in it.
                async with asyncio.timeout(timeout_s):
                    await readable
        finally:
            loop.remove_reader(descriptor)
        return self._drain()

    def forget(self, peer: str) -> None:
        """Drop what is queued for a peer known to be gone."""
        if (old := self._peers.pop(peer, None)) is not None:
            old.socket.close(linger=0)

    def close(self) -> None:
        """Give queued messages a moment to leave, then close. The name is free again."""
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:  # Not a successor's.
                self._path.unlink()
        self._pull.close(linger=0)
        for peer in self._peers.values():
            peer.socket.close(linger=LINGER_MS)
        self._peers.clear()
        self._context.term()

    def _socket_to(self, to: str) -> zmq.Socket[bytes] | None:
        peer = self._peers.get(to)
        try:
            identity = _identity(self._folder / f"{to}.sock")
        except OSError:
            self.forget(to)
            return None
        if peer is not None and peer.identity == identity:
            return peer.socket
        self.forget(to)
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, MAX_QUEUED)
        socket.set(zmq.RECONNECT_IVL, -1)
        socket.connect(f"ipc://{socket_path(self._folder, to)}")
        self._peers[to] = _Peer(socket, identity)
        return socket

    def _drain(self) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        for _ in range(MAX_BATCH):
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._decode(frames)
            if message is not None:
                messages.append(message)
        self.counts["received"] += len(messages)
        return messages

    def _decode(self, frames: list[bytes]) -> AnyMessage | None:
        try:
            header, body, grant = frames
            sender, started_ns = self._header_decoder.decode(header)
            if started_ns < self._started_ns_of.get(sender, 0):
                self.counts["stale"] += 1
                return None
            message = self._decoder.decode(body)
        except (
            ValueError,
            msgspec.MsgspecError,
        ):  # A wrong number of frames, or frames that are not ours.
            self.counts["malformed"] += 1
            return None
        self._started_ns_of[sender] = started_ns
        if self._grants is not None:
            self._grants.keep(message, grant)
        return message


def socket_path(folder: Path, name: str) -> Path:
    """Where `name` listens. Raises ConfigError if a Unix socket's address cannot hold the path."""
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(
            f"{path}: longer than a Unix socket's {_MAX_PATH} bytes. Set TMPDIR to a shorter"
            " folder."
        )
    return path


def _resolve(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)  # The inode alone may be used again.
    return found.st_ino, found.st_ctime_ns

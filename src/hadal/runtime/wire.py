"""Messages between processes (effect Send of core/seams): pyzmq PUSH/PULL with msgpack, over Unix
sockets between processes of a host and over TCP between hosts.

A process owns one PULL socket at `<folder>/<name>.sock`; every peer that sends to it has one PUSH
socket. If its run spans hosts, it owns another PULL socket at a TCP port of its node's address.
That address is in `<folder>/<name>.at`, and is copied to the other nodes' folders (runtime/nodes).
Sending never blocks: a message to a process that is absent or does not read is dropped and counted,
and the roles' deadlines recover. Does not depend on the messages' meaning.

A restart must not deliver a dead process's messages to its successor, nor accept messages of the dead
process after those of its successor:

- A sender checks the socket file's identity before it sends. A new file means a new process, so the
  old socket is closed with its queue. The file appears by rename once it listens, so its existence is
  enough. PUSH sockets never reconnect to a Unix socket.
- Every frame has its sender's name and epoch number, which counts the processes of that name. After a
  frame of a later epoch, frames of earlier ones are dropped. No clocks are compared.
- A far message, which goes to another host, names the epoch of its receiver: the kernel may give
  the port of a dead process to another one, and zmq reconnects by itself.

A broken connection must not lose a message between two live processes. So a far message has a number
and is kept until the receiver acknowledges it, with its next message or after ACK_S. After a break,
a new connection is opened and all kept messages are sent again. The receiver takes each number once,
in order.

CURVE encrypts the traffic between hosts (RFC 26), with one key pair derived from the deployment's
secret. Its public half is never sent, and a handshake is impossible without it. So a completed
handshake proves that both ends have the secret.

zmq is used instead of runtime/transfer/peers, because zmq's own threads queue, send and encrypt
messages, so that no caller waits.

Not thread-safe: one thread at a time. The sockets, near and far, are in runtime/wire_sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from hadal.core.errors import ConfigError
from hadal.core.handshake import is_near
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.nodes import Address
from hadal.runtime.process.process import Run
from hadal.runtime.transfer.grants import Grants
from hadal.runtime.wire_sockets import (
    MAX_MESSAGE_BYTES,
    MAX_SOCKETS,
    FarLink,
    NearLink,
    Network,
    WireHeader,
    WireLinks,
    WireListener,
    keys_of,
)

MAX_BATCH = 256
"""Maximum number of messages per `receive`, so that timers are checked in between."""
ACK_S = 0.2
"""Time that an acknowledgement may wait for a message in its direction, to be sent with it."""
ACK_AFTER = 256
"""Number of messages after which an acknowledgement is sent immediately."""
LOOK_S = 0.1
"""Time between checks for broken connections to other hosts."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
"""Pattern of valid process names; they become parts of file names."""


class _Heard:
    """State of the messages from one sender."""

    __slots__ = ("epoch_number", "link", "number", "owed", "owed_since_s")

    def __init__(self, epoch_number: int) -> None:
        self.epoch_number = epoch_number
        self.link = 0
        self.number = 0
        """Number of the last message accepted on this link."""
        self.owed = 0
        """Messages received since the last acknowledgement."""
        self.owed_since_s = 0.0


class ZmqWire:
    """Messages to and from the processes of one run. `counts` has their outcomes."""

    def __init__(
        self,
        name: str,
        folder: Path,
        grants: Grants | None = None,
        *,
        epoch_number: int = 0,
        network: Network | None = None,
    ) -> None:
        """Own the name `name`, as the process of `epoch_number`. `grants` are attached to messages
        that pass leases on. `network` None: receive from this host only. Raises ConfigError if the
        folder's path is too long for a Unix socket, or if the address is not one of this host's.
        """
        self.name = name
        self.counts: Counter[str] = Counter()
        """"sent", "received", "again" (connections reopened after a break), and dropped messages: "absent",
        "full", "large", "malformed", "stale", "repeated", "early" (an earlier one has to be resent first).
        """
        self._grants = grants
        self._near_header = msgspec.msgpack.encode((name, epoch_number))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
        self._header_decoder = msgspec.msgpack.Decoder(WireHeader)
        self._heard: dict[str, _Heard] = {}
        self._looked_s = 0.0
        self._is_drained = True
        """True if no further messages were pending at the last read."""
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        try:
            self._listener = WireListener(self._context, folder, name, epoch_number, network)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        keys = keys_of(network.secret) if network else (b"", b"")
        self._links = WireLinks(self._context, folder, keys, spans_hosts=network is not None)
        self._header = WireHeader(name, epoch_number, endpoint=self._listener.endpoint)

    @property
    def endpoint(self) -> str:
        """Return the address for other hosts; empty without one."""
        return self._listener.endpoint

    def send(self, to: str, message: AnyMessage) -> None:
        """Queue the message for `to`, without waiting. If that fails, drop and count it."""
        peer = self._links.to(to)
        if peer is None:
            self.counts["absent"] += 1
            return
        grant = b"" if self._grants is None else self._grants.to(to, message)
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES // 2:
            # The receiver would close the connection, at every attempt.
            self.counts["large"] += 1
            return
        try:
            if isinstance(peer, NearLink):
                peer.socket.send_multipart((self._near_header, body, grant), zmq.NOBLOCK)
            elif peer.is_full:
                raise zmq.Again
            else:
                far = peer
                self._say(to, far, lambda header: far.send(header, body, grant))
        except zmq.Again:
            self.counts["full"] += 1
            return
        self.counts["sent"] += 1

    def wake_on(self, fd: int) -> None:
        """Let `receive` return early when this descriptor is readable (eventfd, signal pipe)."""
        self._listener.wake_on(fd)

    def wake_on_no_more(self, fd: int) -> None:
        """Stop watching the file descriptor."""
        self._listener.wake_on_no_more(fd)

    def expect(self, peer: str, epoch_number: int) -> None:
        """Accept no earlier epoch of this peer any more: a process with this epoch number is being
        started, even if it has not sent anything yet.
        """
        heard = self._heard.get(peer)
        if heard is None or heard.epoch_number < epoch_number:
            self._heard[peer] = _Heard(epoch_number)

    def receive(self, timeout_s: float) -> list[AnyMessage]:
        """Return received messages, at most MAX_BATCH. If there are none, wait up to `timeout_s`
        for one or for a `wake_on` descriptor. It may return an empty list earlier, to maintain
        links.
        """
        messages = self._drain()
        if messages or timeout_s <= 0:
            return messages
        # Rounded up: otherwise the last millisecond before a timer would be a busy loop.
        self._listener.wait(int(self._may_wait_s(timeout_s) * 1000) + 1)
        return self._drain()

    async def receive_async(self, timeout_s: float = 1.0) -> list[AnyMessage]:
        """Receive messages as `receive` does, in an asyncio loop. May return an empty list early:
        the descriptor also becomes readable for other events.
        """
        messages = self._drain()
        if messages or not self._is_drained:
            return messages
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        # zmq's descriptor signals new messages only after all old ones were read, as _drain did.
        descriptors = self._listener.descriptors()
        for descriptor in descriptors:
            loop.add_reader(descriptor, _resolve, readable)
        try:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: it loses a cancellation that arrives with a message.
                async with asyncio.timeout(self._may_wait_s(timeout_s)):
                    await readable
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
        return self._drain()

    def forget(self, peer: str) -> None:
        """Drop the messages queued for a peer known to be gone, and its learnt address."""
        self._links.forget(peer)

    def close(self) -> None:
        """Give queued messages a moment to be sent, then close and release the name."""
        self._listener.close()
        self._links.close()
        self._context.term()

    def _say(self, to: str, peer: FarLink, say: Callable[[WireHeader], bool]) -> None:
        """Send a header with an acknowledgement by `say`, which returns whether that succeeded."""
        heard, epoch_number = self._heard.get(to), peer.address.epoch_number
        # Link numbers restart in each epoch: never acknowledge another epoch's messages.
        link, number = (
            (heard.link, heard.number) if heard and heard.epoch_number == epoch_number else (0, 0)
        )
        header = msgspec.structs.replace(
            self._header, acked_link=link, acked=number, to=to, to_epoch_number=epoch_number
        )
        if say(header) and heard:
            heard.owed = 0

    def _may_wait_s(self, timeout_s: float) -> float:
        """Return the longest wait: an acknowledgement may become due, or a connection with kept
        messages may break.
        """
        is_waiting = any(heard.owed for heard in self._heard.values()) or self._links.is_waiting
        return min(timeout_s, LOOK_S) if is_waiting else timeout_s

    def _drain(self) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        self._is_drained = True
        for pull in self._listener.in_turn():
            for _ in range(MAX_BATCH - len(messages)):
                try:
                    frames = pull.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                message = self._decode(frames)
                if message is not None:
                    messages.append(message)
            else:
                self._is_drained = False
        self.counts["received"] += len(messages)
        if self._listener.far is not None:
            self._look_after_links(time.monotonic())
        return messages

    def _look_after_links(self, now_s: float) -> None:
        """Send due acknowledgements, and reopen broken connections."""
        for name, heard in list(self._heard.items()):
            is_due = heard.owed >= ACK_AFTER or now_s - heard.owed_since_s >= ACK_S
            if not heard.owed or not is_due:
                continue
            heard.owed_since_s = now_s
            if isinstance(peer := self._links.to(name), FarLink):
                self._say(name, peer, peer.acknowledge)
            else:
                heard.owed = 0  # The peer is gone.
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for name, last in self._links.all():
            # `to` drops the link of a process that is gone, which would keep its messages for ever.
            is_waiting = isinstance(last, FarLink) and last.is_waiting
            peer = self._links.to(name) if is_waiting else last
            if not isinstance(peer, FarLink):
                continue
            if peer.has_broken():
                self.counts["again"] += 1
                try:
                    self._say(name, peer, peer.open_again)
                except OSError:
                    self._links.drop(name)
            elif peer.has_rest:
                self._say(name, peer, peer.send_rest)

    def _decode(self, frames: list[bytes]) -> AnyMessage | None:
        try:
            encoded, body, grant = frames
            header = self._header_decoder.decode(encoded)
            if not self._is_next(header):
                return None
            message = self._decoder.decode(body)
        except (
            ValueError,
            msgspec.MsgspecError,
        ):  # Wrong number of frames, or foreign frames.
            self.counts["malformed"] += 1
            return None
        if self._grants is not None:
            self._grants.keep(message, grant)
        return message

    def _is_next(self, header: WireHeader) -> bool:
        """Return whether to accept the message: its epoch is not an earlier one and, if it is from
        another host, it is for this epoch and next in its link. Raises ValueError.
        """
        if header.link and not _is_sound(header):
            raise ValueError("the header is invalid.")
        if header.link and (header.to, header.to_epoch_number) != (
            self.name,
            self._header.epoch_number,
        ):
            self.counts["stale"] += 1
            return False
        heard = self._heard.get(header.name)
        if heard is None or heard.epoch_number < header.epoch_number:
            heard = self._heard[header.name] = _Heard(header.epoch_number)
            self._links.unlearn(header.name)  # The learnt address is that of an earlier process.
        if (header.epoch_number, header.link) < (
            heard.epoch_number,
            heard.link if header.link else 0,
        ):
            self.counts["stale"] += 1
            return False
        if not header.link:
            return True
        peer = self._links.last(header.name)
        if isinstance(peer, FarLink) and peer.link == header.acked_link:
            peer.acknowledged(header.acked)
        if not header.number:
            return False
        if header.link > heard.link:
            heard.link, heard.number = header.link, 0
            self._links.learn(header.name, Address(header.epoch_number, header.endpoint))
        if not heard.owed:
            heard.owed_since_s = time.monotonic()
        heard.owed += 1
        if header.number != heard.number + 1:
            self.counts["repeated" if header.number <= heard.number else "early"] += 1
            return False
        heard.number = header.number
        return True


def open_wire(
    run: Run, name: str, folder: Path, epoch_number: int, grants: Grants | None = None
) -> ZmqWire:
    """Return the wire of a run's process, reachable from other hosts if the run spans several.
    Raises ConfigError.
    """
    network = None if is_near(run.address) else Network(run.address, run.secret)
    return ZmqWire(
        name, folder, grants or Grants(run.secret, name), epoch_number=epoch_number, network=network
    )


def _is_sound(header: WireHeader) -> bool:
    """Return whether the sender's name is valid, and its endpoint a TCP address."""
    return bool(_NAME.fullmatch(header.name)) and header.endpoint.startswith("tcp://")


def _resolve(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)

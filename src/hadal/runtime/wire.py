"""The Wire seam's messages, live: pyzmq PUSH/PULL, msgpack inside, over Unix sockets between the
processes of a host and over TCP between hosts.

A process owns one PULL socket at `<folder>/<name>.sock`; every peer that sends to it has one PUSH
socket. Where its run spans hosts it owns another at a TCP port of its node's address, and says so
in `<folder>/<name>.at`, which reaches the folders of the other nodes (runtime/nodes). Nothing here
blocks: a message to a process that is absent or does not read is dropped and counted, and the
roles' deadlines recover. Knows nothing of what messages mean.

What a restart must not do is hand a successor what was meant for the dead, or let the dead speak
after the successor:

- A sender looks at the socket file's identity before it sends; a new file is a new process, so the
  old socket goes, with its queue. The file appears by rename once it listens, so seeing it is
  enough. PUSH sockets never reconnect to a Unix socket.
- Every frame carries its sender's name and epoch number, which counts the processes of that name.
  Frames of earlier epochs are dropped once a later one was received. No clock is compared.
- A far message names the epoch that it is meant for. The kernel gives the port of a dead process to
  the next that asks, and zmq connects again by itself.

What a broken connection must not do is lose a message between two that live. So a far message has a
number, and is kept until the receiver said that it has it: with its next message, or after ACK_S.
When a connection broke, another is opened and all that is kept goes again. The receiver takes each
number once, and in order.

CURVE encrypts what goes between hosts (RFC 26), with one key pair that is derived from the
deployment's secret. Its public half is never said aloud, and nobody who does not know it can
finish a handshake: so both ends hold the secret.

zmq frames the messages and not runtime/transfer/peers, because zmq's own threads queue, send and
encrypt them, so that no caller waits.

One thread at a time may use a wire. Its sockets, near and far, are in runtime/wire_sockets.
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
"""Messages returned at once, so that timers are looked at in between."""
ACK_S = 0.2
"""How long a far message may wait for a message that goes the other way, to say with it that it
came.
"""
ACK_AFTER = 256
"""Messages after which that is said at once."""
LOOK_S = 0.1
"""How often it is looked whether connections to other hosts broke."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
"""What may be part of a file's name."""


class _Heard:
    """What came from one sender."""

    __slots__ = ("epoch_number", "link", "number", "owed", "owed_since_s")

    def __init__(self, epoch_number: int) -> None:
        self.epoch_number = epoch_number
        self.link = 0
        self.number = 0
        """The last that was taken, of this link."""
        self.owed = 0
        """Messages that came since the sender was last told what came."""
        self.owed_since_s = 0.0


class ZmqWire:
    """Messages to and from the processes of one run. `counts` tells what became of them."""

    def __init__(
        self,
        name: str,
        folder: Path,
        grants: Grants | None = None,
        *,
        epoch_number: int = 0,
        network: Network | None = None,
    ) -> None:
        """Own the name `name`, as the process of `epoch_number`; `grants` go beside the messages that hand
        leases on. `network` None: only the processes of this host are to be heard. Raises
        ConfigError if the folder's path is too long for a Unix socket, or the address is none of
        this host's.
        """
        self.name = name
        self.counts: Counter[str] = Counter()
        """"sent", "received", "again" (connections that broke and were opened anew), and dropped:
        "absent", "full", "large", "malformed", "stale", "repeated", "early" (one before it comes
        again).
        """
        self._grants = grants
        self._near_header = msgspec.msgpack.encode((name, epoch_number))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
        self._header_decoder = msgspec.msgpack.Decoder(WireHeader)
        self._heard: dict[str, _Heard] = {}
        self._looked_s = 0.0
        self._is_drained = True
        """Whether nothing more had come when it was looked last."""
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
        """Where other hosts reach it; empty if they do not."""
        return self._listener.endpoint

    def send(self, to: str, message: AnyMessage) -> None:
        """Queue the message for `to`; never waits. What cannot be queued is dropped and counted."""
        peer = self._links.to(to)
        if peer is None:
            self.counts["absent"] += 1
            return
        grant = b"" if self._grants is None else self._grants.to(to, message)
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES // 2:
            # Its receiver would close the connection, now and whenever it is sent again.
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
        """Let `receive` return early when this file descriptor is readable (an eventfd, a signal's
        pipe).
        """
        self._listener.wake_on(fd)

    def wake_on_no_more(self, fd: int) -> None:
        """The descriptor is not looked at any more."""
        self._listener.wake_on_no_more(fd)

    def expect(self, peer: str, epoch_number: int) -> None:
        """A process of this name is started with this epoch number: receive no earlier one any more, though the
        later has not spoken yet.
        """
        heard = self._heard.get(peer)
        if heard is None or heard.epoch_number < epoch_number:
            self._heard[peer] = _Heard(epoch_number)

    def receive(self, timeout_s: float) -> list[AnyMessage]:
        """Return what has come, at most MAX_BATCH; wait up to `timeout_s` for the first or a
        `wake_on` descriptor. It may return none before the time is over: links are to be looked
        after.
        """
        messages = self._drain()
        if messages or timeout_s <= 0:
            return messages
        # Rounded up: rounded down, the last millisecond before a timer would be spent spinning.
        self._listener.wait(int(self._may_wait_s(timeout_s) * 1000) + 1)
        return self._drain()

    async def receive_async(self, timeout_s: float = 1.0) -> list[AnyMessage]:
        """`receive`, in an asyncio loop. It may return none before the time is over: the descriptor
        becomes readable for more than messages.
        """
        messages = self._drain()
        if messages or not self._is_drained:
            return messages
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        # zmq's descriptor tells of new messages only once all old ones were taken, which _drain
        # just did.
        descriptors = self._listener.descriptors()
        for descriptor in descriptors:
            loop.add_reader(descriptor, _resolve, readable)
        try:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: a cancellation that comes with a message is lost in it.
                async with asyncio.timeout(self._may_wait_s(timeout_s)):
                    await readable
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
        return self._drain()

    def forget(self, peer: str) -> None:
        """Drop what is queued for a peer known to be gone, and where it said that it listens."""
        self._links.forget(peer)

    def close(self) -> None:
        """Give queued messages a moment to leave, then close. The name is free again."""
        self._listener.close()
        self._links.close()
        self._context.term()

    def _say(self, to: str, peer: FarLink, say: Callable[[WireHeader], bool]) -> None:
        """Have the peer told something, and with it what came from there; `say` tells whether it
        went.
        """
        heard, epoch_number = self._heard.get(to), peer.address.epoch_number
        # Links are counted anew in each epoch: what another one sent is not to be acknowledged.
        link, number = (
            (heard.link, heard.number) if heard and heard.epoch_number == epoch_number else (0, 0)
        )
        header = msgspec.structs.replace(
            self._header, acked_link=link, acked=number, to=to, to_epoch_number=epoch_number
        )
        if say(header) and heard:
            heard.owed = 0

    def _may_wait_s(self, timeout_s: float) -> float:
        """How long to wait at most: an acknowledgement may be due, or a connection break that held
        something.
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
        """Acknowledge what came a while ago, and open again what has broken."""
        for name, heard in list(self._heard.items()):
            is_due = heard.owed >= ACK_AFTER or now_s - heard.owed_since_s >= ACK_S
            if not heard.owed or not is_due:
                continue
            heard.owed_since_s = now_s
            if isinstance(peer := self._links.to(name), FarLink):
                self._say(name, peer, peer.acknowledge)
            else:
                heard.owed = 0  # It is gone.
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for name, last in self._links.all():
            # Nothing is kept for one that is gone and never spoken to again.
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
        ):  # A wrong number of frames, or frames that are not ours.
            self.counts["malformed"] += 1
            return None
        if self._grants is not None:
            self._grants.keep(message, grant)
        return message

    def _is_next(self, header: WireHeader) -> bool:
        """Whether the message is to be taken: of no earlier epoch and, from another host, for this
        one and the next of its link. Raises ValueError.
        """
        if header.link and not _is_sound(header):
            raise ValueError("it says of itself what cannot be.")
        if header.link and (header.to, header.to_epoch_number) != (
            self.name,
            self._header.epoch_number,
        ):
            self.counts["stale"] += 1
            return False
        heard = self._heard.get(header.name)
        if heard is None or heard.epoch_number < header.epoch_number:
            heard = self._heard[header.name] = _Heard(header.epoch_number)
            self._links.unlearn(header.name)  # Another one listened there.
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
    """The wire of a process of a run, which other hosts reach where the run spans any. Raises
    ConfigError.
    """
    network = None if is_near(run.address) else Network(run.address, run.secret)
    return ZmqWire(
        name, folder, grants or Grants(run.secret, name), epoch_number=epoch_number, network=network
    )


def _is_sound(header: WireHeader) -> bool:
    """Whether the sender's name can be one, and where it listens a place on another host."""
    return bool(_NAME.fullmatch(header.name)) and header.endpoint.startswith("tcp://")


def _resolve(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)

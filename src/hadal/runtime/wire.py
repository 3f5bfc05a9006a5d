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
- Every frame carries its sender's name and life, which whoever starts processes counts. Once a
  later life was heard, earlier ones are dropped. No clock is compared.
- A far message names the life that it is meant for. The kernel gives the port of a dead process to
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

One thread at a time may use a wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hadal.core.errors import ConfigError
from hadal.core.handshake import is_near, key_of
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.nodes import Address
from hadal.runtime.process.process import Run
from hadal.runtime.transfer.grants import Grants

MAX_QUEUED = 4096
"""Messages held for one peer that does not read. A decode step is one message, so this is minutes
of steps.
"""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens is 5 MB; anything beyond is not ours."""
MAX_BATCH = 256
"""Messages returned at once, so that timers are looked at in between."""
NEVER_MS = 2**31 - 1
"""Before zmq looks for somebody else at the address of a process that is gone: 25 days. Told not to
at all (-1), it waits for the messages to that process for ever when all is closed.
"""
LINGER_MS = 200
"""How long closing waits for what is queued."""
ACK_S = 0.2
"""How long a far message may wait for a message that goes the other way, to say with it that it
came.
"""
ACK_AFTER = 256
"""Messages after which that is said at once."""
LOOK_S = 0.1
"""How often it is looked whether connections to other hosts broke."""
SILENT_MS = 2000
"""A connection to another host that is silent for so long has broken."""
BEAT_MS = 500
"""How often zmq says on a connection that it is there, and how long opening one may take."""
RECONNECT_MS = 100
"""Between two tries to open one."""
MAX_SOCKETS = 1 << 14
"""A process may have so many: three a link to another host, and the supervisor has one to every rank. (zmq's own
limit is 1,023.)
"""
PURPOSE = "wire 1"
"""What the key of these links is derived for (core/handshake.key_of)."""
_MAX_PATH = 107
"""sockaddr_un.sun_path less its final zero (unix(7))."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
"""What may be part of a file's name."""

Identity = tuple[int, int]


@dataclass(frozen=True)
class Network:
    """What a process needs to be heard by other hosts: its node's address, and the deployment's
    secret.
    """

    address: str
    secret: bytes


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of a message. Of a near one only the first two fields are set."""

    name: str
    life: int
    link: int = 0
    """The link's number, counted up by the sender for this receiver."""
    number: int = 0
    """The message's number on that link, from 1 on; 0: this one only acknowledges."""
    acked_link: int = 0
    acked: int = 0
    """The last number that the sender took from the receiver on that link."""
    endpoint: str = ""
    """Where the sender listens: what answers it may be faster than the news of its address."""
    to: str = ""
    to_life: int = 0
    """Whom it is for, and what it acknowledges to."""


class _Near:
    """One PUSH socket to a process of this host."""

    def __init__(self, context: zmq.Context[Any], path: Path, identity: Identity) -> None:
        self.identity = identity
        self.socket: zmq.Socket[bytes] = _socket(context, zmq.PUSH)
        self.socket.set(zmq.SNDHWM, MAX_QUEUED)
        self.socket.set(zmq.RECONNECT_IVL, NEVER_MS)
        self.socket.connect(f"ipc://{path}")

    def close(self, linger_ms: int = 0) -> None:
        self.socket.close(linger=linger_ms)


class _Far:
    """A link to a process of another host: one socket after the other, and what it may have to send
    again.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: Address,
        link: int,
        keys: tuple[bytes, bytes],
    ) -> None:
        self.address = address
        self.identity: Identity | None = None
        """Of the file that the address was read from; None: the process said it itself."""
        self.link = link
        self._context = context
        self._keys = keys
        self._num_sent = self._num_pushed = 0
        """The last number there is, and the last that zmq took: it may take none, and a receiver
        takes none after a gap.
        """
        self._kept: deque[tuple[int, bytes, bytes]] = deque()
        """Number, body and grant of what the receiver did not acknowledge yet."""
        self._connect()

    @property
    def is_full(self) -> bool:
        return len(self._kept) >= MAX_QUEUED

    @property
    def is_waiting(self) -> bool:
        """Whether it may have to send anything again."""
        return bool(self._kept)

    @property
    def has_rest(self) -> bool:
        """Whether there is anything that zmq did not take yet."""
        return self._num_pushed < self._num_sent

    def send(self, header: _Header, body: bytes, grant: bytes) -> bool:
        """Number the message, keep it and send it; False if it has not gone yet. The caller looked
        whether there is room.
        """
        self._num_sent += 1
        self._kept.append((self._num_sent, body, grant))
        return self.send_rest(header)

    def send_rest(self, header: _Header) -> bool:
        """Send what has not gone yet, as far as zmq takes it. True if all has gone now."""
        while self.has_rest:
            number, body, grant = self._kept[self._num_pushed - self._num_sent]
            if not self._push(header, number, body, grant):
                return False
            self._num_pushed = number
        return True

    def acknowledge(self, header: _Header) -> bool:
        """Say no more than the header does. False if that did not go."""
        return self._push(header, 0, b"", b"")

    def acknowledged(self, number: int) -> None:
        """The receiver has all up to this number."""
        while self._kept and self._kept[0][0] <= number:
            self._num_pushed = max(self._num_pushed, self._kept.popleft()[0])

    def has_broken(self) -> bool:
        """Whether a connection that had been there ended since the last call."""
        is_broken = False
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                self._was_open |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                is_broken |= self._was_open and event == zmq.EVENT_DISCONNECTED
        return is_broken

    def open_again(self, header: _Header) -> bool:
        """Connect anew, and send all that the receiver may not have: an acknowledgement may be lost
        as well. True if all has gone.
        """
        self.close()
        self._connect()
        self._num_pushed = self._num_sent - len(self._kept)
        return self.send_rest(header) if self._kept else self.acknowledge(header)

    def close(self, linger_ms: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _connect(self) -> None:
        """Raises OSError."""
        public, secret = self._keys
        self._socket: zmq.Socket[bytes] = _socket(self._context, zmq.PUSH)
        self._socket.set(zmq.SNDHWM, MAX_QUEUED + 1)  # An acknowledgement goes beside them.
        self._socket.set(zmq.CURVE_SERVERKEY, public)
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.set(zmq.CONNECT_TIMEOUT, BEAT_MS)
        self._socket.set(zmq.IPV6, "[" in self.address.endpoint)
        _beat(self._socket)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._was_open = False
        try:
            self._monitor = self._socket.get_monitor_socket(events)
            self._socket.connect(self.address.endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise OSError(f"{self.address.endpoint!r} leads nowhere ({error}).") from error

    def _push(self, header: _Header, number: int, body: bytes, grant: bytes) -> bool:
        numbered = msgspec.structs.replace(header, link=self.link, number=number)
        try:
            self._socket.send_multipart(
                (msgspec.msgpack.encode(numbered), body, grant), zmq.NOBLOCK
            )
        except zmq.Again:
            return False
        return True


class _Heard:
    """What came from one sender."""

    __slots__ = ("life", "link", "number", "owed", "owed_since_s")

    def __init__(self, life: int) -> None:
        self.life = life
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
        life: int = 0,
        network: Network | None = None,
    ) -> None:
        """Own the name `name`, in its `life`-th life; `grants` go beside the messages that hand
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
        self._folder = folder
        self._life = life
        self._path = socket_path(folder, name)
        self._near_header = msgspec.msgpack.encode((name, life))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
        self._header_decoder = msgspec.msgpack.Decoder(_Header)
        self._heard: dict[str, _Heard] = {}
        self._peers: dict[str, _Near | _Far] = {}
        self._learnt: dict[str, Address] = {}
        """Where senders said that they listen, until the folder says as much."""
        self._num_links = 0
        self._looked_s = 0.0
        self._is_drained = True
        """Whether nothing more had come when it was looked last."""
        self._keys = _keys(network.secret) if network else (b"", b"")
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._pull = self._puller()
        unborn = socket_path(folder, f"{name}.new")
        with contextlib.suppress(FileNotFoundError):
            unborn.unlink()
        self._pull.bind(f"ipc://{unborn}")
        self._far_pull: zmq.Socket[bytes] | None = None
        self._endpoint = ""
        if network is not None:
            try:
                self._far_pull = self._open_to_hosts(network, life)
            except ConfigError:
                self._context.destroy(linger=0)
                unborn.unlink()
                raise
        self._header = _Header(name, life, endpoint=self._endpoint)
        unborn.rename(self._path)
        self._identity = _identity(self._path)
        self._poller = zmq.Poller()
        self._in_turn = self._pulls()
        for pull in self._in_turn:
            self._poller.register(pull, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """Where other hosts reach it; empty if they do not."""
        return self._endpoint

    def send(self, to: str, message: AnyMessage) -> None:
        """Queue the message for `to`; never waits. What cannot be queued is dropped and counted."""
        peer = self._peer(to)
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
            if isinstance(peer, _Near):
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
        self._poller.register(fd, zmq.POLLIN)

    def wake_on_no_more(self, fd: int) -> None:
        """The descriptor is not looked at any more."""
        self._poller.unregister(fd)

    def expect(self, peer: str, life: int) -> None:
        """A process of this name is started in this life: hear no earlier one any more, though the
        later has not spoken yet.
        """
        heard = self._heard.get(peer)
        if heard is None or heard.life < life:
            self._heard[peer] = _Heard(life)

    def receive(self, timeout_s: float) -> list[AnyMessage]:
        """Return what has come, at most MAX_BATCH; wait up to `timeout_s` for the first or a
        `wake_on` descriptor. It may return none before the time is over: links are to be looked
        after.
        """
        messages = self._drain()
        if messages or timeout_s <= 0:
            return messages
        # Rounded up: rounded down, the last millisecond before a timer would be spent spinning.
        self._poller.poll(int(self._may_wait_s(timeout_s) * 1000) + 1)
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
        descriptors = [pull.FD for pull in self._pulls()]
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
        self._learnt.pop(peer, None)
        self._drop(peer)

    def close(self) -> None:
        """Give queued messages a moment to leave, then close. The name is free again."""
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:  # Not a successor's.
                self._path.unlink()
            path = address_path(self._folder, self.name)
            if read_address(path) == Address(self._life, self._endpoint):
                path.unlink()
        for pull in self._pulls():
            pull.close(linger=0)
        for peer in self._peers.values():
            peer.close(LINGER_MS)
        self._peers.clear()
        self._context.term()

    def _drop(self, peer: str) -> None:
        """Close what led to a peer, with all that is queued."""
        if (old := self._peers.pop(peer, None)) is not None:
            old.close()

    def _puller(self) -> zmq.Socket[bytes]:
        pull: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        pull.set(zmq.RCVHWM, MAX_QUEUED)
        pull.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        return pull

    def _open_to_hosts(self, network: Network, life: int) -> zmq.Socket[bytes]:
        """Listen at the node's address and there alone, and write down at which port."""
        pull = self._puller()
        # A sender is told by us when it is to stop. Were it zmq that stops reading, beats would not
        # be read either, and the connection would be taken for broken.
        pull.set(zmq.RCVHWM, 4 * MAX_QUEUED)
        pull.set(zmq.IPV6, ":" in network.address)
        pull.set(zmq.CURVE_SERVER, 1)
        pull.set(zmq.CURVE_SECRETKEY, self._keys[1])
        _beat(pull)
        try:
            port = pull.bind_to_random_port(f"tcp://{_bracketed(network.address)}")
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen at {network.address}: {error}.") from error
        self._endpoint = f"tcp://{_bracketed(network.address)}:{port}"
        write_address(self._folder, self.name, Address(life, self._endpoint))
        return pull

    def _pulls(self) -> list[zmq.Socket[bytes]]:
        return [self._pull] if self._far_pull is None else [self._pull, self._far_pull]

    def _peer(self, to: str) -> _Near | _Far | None:
        """What leads to the process that has the name now; None: none has."""
        peer = self._peers.get(to)
        try:
            identity = _identity(self._folder / f"{to}.sock")
        except OSError:
            if self._far_pull is not None:
                return self._far_peer(to, peer)
            self.forget(to)
            return None
        if peer is not None and peer.identity == identity:
            return peer
        self._drop(to)
        try:
            self._peers[to] = _Near(self._context, socket_path(self._folder, to), identity)
        except OSError:
            return None
        return self._peers[to]

    def _far_peer(self, to: str, peer: _Near | _Far | None) -> _Far | None:
        """The same for a process of another host. `peer`: what led to it last."""
        path, learnt = address_path(self._folder, to), self._learnt.get(to)
        identity: Identity | None = None
        with contextlib.suppress(OSError):
            identity = _identity(path)
            if isinstance(peer, _Far) and peer.identity == identity and learnt is None:
                return peer
            address = read_address(path)
            if learnt is None or learnt.life <= address.life:
                self._learnt.pop(to, None)
                learnt = address
        if learnt is None:
            self._drop(to)
            return None
        if not isinstance(peer, _Far) or peer.address != learnt:
            self._drop(to)
            self._num_links += 1
            try:
                peer = _Far(self._context, learnt, self._num_links, self._keys)
            except OSError:
                return None
            self._peers[to] = peer
        peer.identity = identity
        return peer

    def _say(self, to: str, peer: _Far, say: Callable[[_Header], bool]) -> None:
        """Have the peer told something, and with it what came from there; `say` tells whether it
        went.
        """
        heard, life = self._heard.get(to), peer.address.life
        # Links are counted anew in each life: what another one sent is not to be acknowledged.
        link, number = (heard.link, heard.number) if heard and heard.life == life else (0, 0)
        header = msgspec.structs.replace(
            self._header, acked_link=link, acked=number, to=to, to_life=life
        )
        if say(header) and heard:
            heard.owed = 0

    def _may_wait_s(self, timeout_s: float) -> float:
        """How long to wait at most: an acknowledgement may be due, or a connection break that held
        something.
        """
        is_waiting = any(heard.owed for heard in self._heard.values()) or any(
            isinstance(peer, _Far) and peer.is_waiting for peer in self._peers.values()
        )
        return min(timeout_s, LOOK_S) if is_waiting else timeout_s

    def _drain(self) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        self._is_drained = True
        self._in_turn.reverse()  # Neither keeps the other waiting for long.
        for pull in self._in_turn:
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
        if self._far_pull is not None:
            self._look_after_links(time.monotonic())
        return messages

    def _look_after_links(self, now_s: float) -> None:
        """Acknowledge what came a while ago, and open again what has broken."""
        for name, heard in list(self._heard.items()):
            is_due = heard.owed >= ACK_AFTER or now_s - heard.owed_since_s >= ACK_S
            if not heard.owed or not is_due:
                continue
            heard.owed_since_s = now_s
            if isinstance(peer := self._peer(name), _Far):
                self._say(name, peer, peer.acknowledge)
            else:
                heard.owed = 0  # It is gone.
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for name, last in list(self._peers.items()):
            # Nothing is kept for one that is gone and never spoken to again.
            is_waiting = isinstance(last, _Far) and last.is_waiting
            peer = self._peer(name) if is_waiting else last
            if not isinstance(peer, _Far):
                continue
            if peer.has_broken():
                self.counts["again"] += 1
                try:
                    self._say(name, peer, peer.open_again)
                except OSError:
                    self._drop(name)
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

    def _is_next(self, header: _Header) -> bool:
        """Whether the message is to be taken: of no earlier life and, from another host, for this
        one and the next of its link. Raises ValueError.
        """
        if header.link and not _is_sound(header):
            raise ValueError("it says of itself what cannot be.")
        if header.link and (header.to, header.to_life) != (self.name, self._life):
            self.counts["stale"] += 1
            return False
        heard = self._heard.get(header.name)
        if heard is None or heard.life < header.life:
            heard = self._heard[header.name] = _Heard(header.life)
            self._learnt.pop(header.name, None)  # Another one listened there.
        if (header.life, header.link) < (heard.life, heard.link if header.link else 0):
            self.counts["stale"] += 1
            return False
        if not header.link:
            return True
        peer = self._peers.get(header.name)
        if isinstance(peer, _Far) and peer.link == header.acked_link:
            peer.acknowledged(header.acked)
        if not header.number:
            return False
        if header.link > heard.link:
            heard.link, heard.number = header.link, 0
            self._learnt[header.name] = Address(header.life, header.endpoint)
        if not heard.owed:
            heard.owed_since_s = time.monotonic()
        heard.owed += 1
        if header.number != heard.number + 1:
            self.counts["repeated" if header.number <= heard.number else "early"] += 1
            return False
        heard.number = header.number
        return True


def open_wire(
    run: Run, name: str, folder: Path, life: int, grants: Grants | None = None
) -> ZmqWire:
    """The wire of a process of a run, which other hosts reach where the run spans any. Raises
    ConfigError.
    """
    network = None if is_near(run.address) else Network(run.address, run.secret)
    return ZmqWire(name, folder, grants or Grants(run.secret, name), life=life, network=network)


def socket_path(folder: Path, name: str) -> Path:
    """Where `name` listens. Raises ConfigError if a Unix socket's address cannot hold the path."""
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(
            f"{path}: longer than a Unix socket's {_MAX_PATH} bytes. Set TMPDIR to a shorter"
            " folder."
        )
    return path


def address_path(folder: Path, name: str) -> Path:
    """Where it is written down at which port of which node `name` listens."""
    return folder / f"{name}.at"


def write_address(folder: Path, name: str, address: Address) -> None:
    """Replace what is known of where `name` listens, at once."""
    unborn = folder / f"{name}.at.new"
    unborn.write_bytes(msgspec.json.encode(address))
    unborn.rename(address_path(folder, name))


def read_address(path: Path) -> Address:
    """Raises OSError if it is not there, or none of ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except msgspec.MsgspecError as error:
        raise OSError(f"{path}: no address of a process ({error}).") from error


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """Raises OSError where there are too many, of sockets or of descriptors."""
    try:
        made: zmq.Socket[bytes] = context.socket(kind)
    except zmq.ZMQError as error:
        raise OSError(f"no socket is to be had ({error}).") from error
    return made


def _keys(secret: bytes) -> tuple[bytes, bytes]:
    """The public and the secret half of the pair of keys that all processes of a deployment
    have.
    """
    encoded = z85.encode(key_of(secret, PURPOSE))
    return zmq.curve_public(encoded), encoded


def _is_sound(header: _Header) -> bool:
    """Whether the sender's name can be one, and where it listens a place on another host."""
    return bool(_NAME.fullmatch(header.name)) and header.endpoint.startswith("tcp://")


def _beat(socket: zmq.Socket[bytes]) -> None:
    """Let zmq notice by itself that the other end cannot be reached any more."""
    socket.set(zmq.HEARTBEAT_IVL, BEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.set(zmq.HANDSHAKE_IVL, SILENT_MS)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _resolve(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _identity(path: Path) -> Identity:
    found = os.stat(path)  # The inode alone may be used again.
    return found.st_ino, found.st_ctime_ns

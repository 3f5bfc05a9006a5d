"""The sockets of a wire: those that a process listens at, and one link to each peer that it sends to.

Knows no message: runtime/wire says what goes over them, and when it goes again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hadal.core.errors import ConfigError
from hadal.core.handshake import key_of
from hadal.core.messages.nodes import Address
from hadal.runtime.addresses import (
    Identity,
    address_path,
    identity_of,
    read_address,
    socket_path,
    write_address,
)

MAX_QUEUED = 4096
"""Messages held for one peer that does not read. A decode step is one message, so this is minutes
of steps.
"""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens is 5 MB; anything beyond is not ours."""
NEVER_MS = 2**31 - 1
"""Time before zmq looks for another process at the address of one that is gone: 25 days. Told not to
at all (-1), it waits for the messages to that process for ever when all is closed.
"""
LINGER_MS = 200
"""How long closing waits for what is queued."""
SILENT_MS = 2000
"""A connection to another host that is silent for so long has broken."""
BEAT_MS = 500
"""How often zmq says on a connection that it is there, and how long opening one may take."""
RECONNECT_MS = 100
"""Between two tries to open one."""
MAX_SOCKETS = 1 << 14
"""Limit of sockets of a process: three a link to another host, and the supervisor has a link to every
rank. (zmq's own limit is 1,023.)
"""
PURPOSE = "wire 1"
"""What the key of these links is derived for (core/handshake.key_of)."""


@dataclass(frozen=True)
class Network:
    """Address of a process's node, which other hosts reach, and the deployment's secret."""

    address: str
    secret: bytes


class WireHeader(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of a message. Of a near one only the first two fields are set."""

    name: str
    epoch_number: int
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
    to_epoch_number: int = 0
    """Whom it is for, and what it acknowledges to."""


class NearLink:
    """One PUSH socket to a process of this host."""

    def __init__(self, context: zmq.Context[Any], path: Path, identity: Identity) -> None:
        self.identity = identity
        self.socket: zmq.Socket[bytes] = _socket(context, zmq.PUSH)
        self.socket.set(zmq.SNDHWM, MAX_QUEUED)
        self.socket.set(zmq.RECONNECT_IVL, NEVER_MS)
        self.socket.connect(f"ipc://{path}")

    def close(self, linger_ms: int = 0) -> None:
        self.socket.close(linger=linger_ms)


class FarLink:
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

    def send(self, header: WireHeader, body: bytes, grant: bytes) -> bool:
        """Number the message, keep it and send it; False if it has not gone yet. The caller looked
        whether there is room.
        """
        self._num_sent += 1
        self._kept.append((self._num_sent, body, grant))
        return self.send_rest(header)

    def send_rest(self, header: WireHeader) -> bool:
        """Send what has not gone yet, as far as zmq takes it. True if all has gone now."""
        while self.has_rest:
            number, body, grant = self._kept[self._num_pushed - self._num_sent]
            if not self._push(header, number, body, grant):
                return False
            self._num_pushed = number
        return True

    def acknowledge(self, header: WireHeader) -> bool:
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

    def open_again(self, header: WireHeader) -> bool:
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

    def _push(self, header: WireHeader, number: int, body: bytes, grant: bytes) -> bool:
        numbered = msgspec.structs.replace(header, link=self.link, number=number)
        try:
            self._socket.send_multipart(
                (msgspec.msgpack.encode(numbered), body, grant), zmq.NOBLOCK
            )
        except zmq.Again:
            return False
        return True


class WireLinks:
    """Links to all peers that a process sends to, by their names."""

    def __init__(
        self,
        context: zmq.Context[Any],
        folder: Path,
        keys: tuple[bytes, bytes],
        *,
        spans_hosts: bool,
    ) -> None:
        self._context = context
        self._folder = folder
        self._keys = keys
        self._spans_hosts = spans_hosts
        self._links: dict[str, NearLink | FarLink] = {}
        self._learnt: dict[str, Address] = {}
        """Where senders said that they listen, until the folder says as much."""
        self._num_made = 0

    def to(self, to: str) -> NearLink | FarLink | None:
        """Return what leads to the process that has the name now; None: none has."""
        peer = self._links.get(to)
        try:
            identity = identity_of(self._folder / f"{to}.sock")
        except OSError:
            if self._spans_hosts:
                return self._far_link(to, peer)
            self.forget(to)
            return None
        if peer is not None and peer.identity == identity:
            return peer
        self.drop(to)
        try:
            self._links[to] = NearLink(self._context, socket_path(self._folder, to), identity)
        except OSError:
            return None
        return self._links[to]

    def _far_link(self, to: str, peer: NearLink | FarLink | None) -> FarLink | None:
        """The same for a process of another host. `peer`: what led to it last."""
        path, learnt = address_path(self._folder, to), self._learnt.get(to)
        identity: Identity | None = None
        with contextlib.suppress(OSError):
            identity = identity_of(path)
            if isinstance(peer, FarLink) and peer.identity == identity and learnt is None:
                return peer
            address = read_address(path)
            if learnt is None or learnt.epoch_number <= address.epoch_number:
                self._learnt.pop(to, None)
                learnt = address
        if learnt is None:
            self.drop(to)
            return None
        if not isinstance(peer, FarLink) or peer.address != learnt:
            self.drop(to)
            self._num_made += 1
            try:
                peer = FarLink(self._context, learnt, self._num_made, self._keys)
            except OSError:
                return None
            self._links[to] = peer
        peer.identity = identity
        return peer

    def last(self, name: str) -> NearLink | FarLink | None:
        """Return the link that led to a peer last, if it is there."""
        return self._links.get(name)

    def all(self) -> list[tuple[str, NearLink | FarLink]]:
        return list(self._links.items())

    @property
    def is_waiting(self) -> bool:
        """Whether any may have to send anything again."""
        return any(isinstance(link, FarLink) and link.is_waiting for link in self._links.values())

    def learn(self, name: str, address: Address) -> None:
        """Note where a sender said that it listens."""
        self._learnt[name] = address

    def unlearn(self, name: str) -> None:
        """Another process listened there."""
        self._learnt.pop(name, None)

    def drop(self, name: str) -> None:
        """Close what led to a peer, with all that is queued."""
        if (old := self._links.pop(name, None)) is not None:
            old.close()

    def forget(self, name: str) -> None:
        """Drop what is queued for a peer known to be gone, and where it said that it listens."""
        self.unlearn(name)
        self.drop(name)

    def close(self) -> None:
        """Give queued messages a moment to leave."""
        for link in self._links.values():
            link.close(LINGER_MS)
        self._links.clear()


class WireListener:
    """The sockets that a process listens at: one for its host and, where its run spans hosts, one
    for the others.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        folder: Path,
        name: str,
        epoch_number: int,
        network: Network | None,
    ) -> None:
        """Own the name. Raises ConfigError if the folder's path is too long for a Unix socket, or
        the address is none of this host's.
        """
        self.far: zmq.Socket[bytes] | None = None
        self._folder = folder
        self._name = name
        self._address = Address(epoch_number, "")
        self._path = socket_path(folder, name)
        unborn = socket_path(folder, f"{name}.new")
        with contextlib.suppress(FileNotFoundError):
            unborn.unlink()
        self.near = _puller(context)
        self.near.bind(f"ipc://{unborn}")
        if network is not None:
            try:
                self.far = self._open_to_hosts(context, network)
            except ConfigError:
                unborn.unlink()
                raise
        unborn.rename(self._path)
        self._identity = identity_of(self._path)
        self._poller = zmq.Poller()
        self._in_turn = self._pulls()
        for pull in self._in_turn:
            self._poller.register(pull, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """Where other hosts reach it; empty if they do not."""
        return self._address.endpoint

    def in_turn(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets, each first every other time: neither keeps the other waiting."""
        self._in_turn.reverse()
        return self._in_turn

    def descriptors(self) -> list[int]:
        """Descriptors that become readable when messages come, once all old ones were taken."""
        return [pull.FD for pull in self._pulls()]

    def wait(self, timeout_ms: int) -> None:
        """Wait for a message, or a `wake_on` descriptor."""
        self._poller.poll(timeout_ms)

    def wake_on(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    def wake_on_no_more(self, fd: int) -> None:
        self._poller.unregister(fd)

    def close(self) -> None:
        """Free the name, unless a successor has it."""
        with contextlib.suppress(OSError):
            if identity_of(self._path) == self._identity:  # Not a successor's.
                self._path.unlink()
            path = address_path(self._folder, self._name)
            if read_address(path) == self._address:
                path.unlink()
        for pull in self._pulls():
            pull.close(linger=0)

    def _pulls(self) -> list[zmq.Socket[bytes]]:
        return [self.near] if self.far is None else [self.near, self.far]

    def _open_to_hosts(self, context: zmq.Context[Any], network: Network) -> zmq.Socket[bytes]:
        """Listen at the node's address and there alone, and write down at which port."""
        pull = _puller(context)
        # A sender is told by us when it is to stop. Were it zmq that stops reading, beats would not
        # be read either, and the connection would be taken for broken.
        pull.set(zmq.RCVHWM, 4 * MAX_QUEUED)
        pull.set(zmq.IPV6, ":" in network.address)
        pull.set(zmq.CURVE_SERVER, 1)
        pull.set(zmq.CURVE_SECRETKEY, keys_of(network.secret)[1])
        _beat(pull)
        try:
            port = pull.bind_to_random_port(f"tcp://{_bracketed(network.address)}")
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen at {network.address}: {error}.") from error
        endpoint = f"tcp://{_bracketed(network.address)}:{port}"
        self._address = Address(self._address.epoch_number, endpoint)
        write_address(self._folder, self._name, self._address)
        return pull


def keys_of(secret: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret half of the pair of keys that all processes of a deployment
    have.
    """
    encoded = z85.encode(key_of(secret, PURPOSE))
    return zmq.curve_public(encoded), encoded


def _puller(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    pull: zmq.Socket[bytes] = context.socket(zmq.PULL)
    pull.set(zmq.RCVHWM, MAX_QUEUED)
    pull.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return pull


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """Raises OSError where there are too many, of sockets or of descriptors."""
    try:
        made: zmq.Socket[bytes] = context.socket(kind)
    except zmq.ZMQError as error:
        raise OSError(f"no socket is to be had ({error}).") from error
    return made


def _beat(socket: zmq.Socket[bytes]) -> None:
    """Let zmq notice by itself that the other end cannot be reached any more."""
    socket.set(zmq.HEARTBEAT_IVL, BEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.set(zmq.HANDSHAKE_IVL, SILENT_MS)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address

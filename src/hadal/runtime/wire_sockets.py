"""Sockets of a wire: those on which a process listens, and one link to each peer that it sends to.

Does not depend on messages: runtime/wire decides what is sent, and what is sent again.
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
"""Maximum number of messages queued for one peer that does not read. A decode step is one message,
so this is minutes of steps.
"""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message. A prompt of a million tokens is 5 MB; a larger message is not ours."""
NEVER_MS = 2**31 - 1
"""Time before zmq reconnects to the address of a process that is gone: 25 days. With -1 (never),
closing would wait for ever for messages to that process.
"""
LINGER_MS = 200
"""Time that closing waits for queued messages."""
SILENT_MS = 2000
"""Silence after which a connection to another host counts as broken."""
BEAT_MS = 500
"""Heartbeat interval of zmq on a connection, and time limit for opening one."""
RECONNECT_MS = 100
"""Pause between attempts to open a connection."""
MAX_SOCKETS = 1 << 14
"""Limit of sockets per process: three per link to another host, and the supervisor has a link to
every rank. (zmq's own limit is 1,023.)
"""
PURPOSE = "wire 1"
"""Purpose from which the key of these links is derived (core/handshake.key_of)."""


@dataclass(frozen=True)
class Network:
    """Address of a process's node, which other hosts reach, and the deployment's secret."""

    address: str
    secret: bytes


class WireHeader(msgspec.Struct, array_like=True, frozen=True):
    """First frame of a message. A message within a host sets only the first two fields."""

    name: str
    epoch_number: int
    link: int = 0
    """Number of the link among the sender's links to other hosts, from 1; 0: within the host."""
    number: int = 0
    """Number of the message on that link, from 1; 0: only an acknowledgement."""
    acked_link: int = 0
    acked: int = 0
    """Last number that this sender accepted from the receiver on link `acked_link`."""
    endpoint: str = ""
    """Address at which the sender listens, for replies before its address file is distributed."""
    to: str = ""
    to_epoch_number: int = 0
    """Epoch number of the receiver `to`, for the message and the acknowledgement."""


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
    """Link to a process of another host: its current socket, and messages it may have to resend."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: Address,
        link: int,
        keys: tuple[bytes, bytes],
    ) -> None:
        self.address = address
        self.identity: Identity | None = None
        """Identity of the address file; None: the address came from the process's own messages."""
        self.link = link
        self._context = context
        self._keys = keys
        self._num_sent = self._num_pushed = 0
        """Number of the last message, and of the last one that zmq accepted. If zmq rejects a
        message, later ones wait: the receiver accepts nothing after a gap.
        """
        self._kept: deque[tuple[int, bytes, bytes]] = deque()
        """(number, body, grant) of messages not acknowledged yet."""
        self._connect()

    @property
    def is_full(self) -> bool:
        return len(self._kept) >= MAX_QUEUED

    @property
    def is_waiting(self) -> bool:
        """Return whether messages may have to be resent."""
        return bool(self._kept)

    @property
    def has_rest(self) -> bool:
        """Return whether zmq has not accepted some messages yet."""
        return self._num_pushed < self._num_sent

    def send(self, header: WireHeader, body: bytes, grant: bytes) -> bool:
        """Number, keep and send a message; False if not sent yet. Callers check `is_full` first."""
        self._num_sent += 1
        self._kept.append((self._num_sent, body, grant))
        return self.send_rest(header)

    def send_rest(self, header: WireHeader) -> bool:
        """Send the unsent messages as far as zmq accepts them. Return True if all were sent."""
        while self.has_rest:
            number, body, grant = self._kept[self._num_pushed - self._num_sent]
            if not self._push(header, number, body, grant):
                return False
            self._num_pushed = number
        return True

    def acknowledge(self, header: WireHeader) -> bool:
        """Send the header alone, as an acknowledgement. Return False if it was not sent."""
        return self._push(header, 0, b"", b"")

    def acknowledged(self, number: int) -> None:
        """Drop the messages up to this number, which the receiver has."""
        while self._kept and self._kept[0][0] <= number:
            self._num_pushed = max(self._num_pushed, self._kept.popleft()[0])

    def has_broken(self) -> bool:
        """Return whether an established connection has ended since the last call."""
        is_broken = False
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                self._was_open |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                is_broken |= self._was_open and event == zmq.EVENT_DISCONNECTED
        return is_broken

    def open_again(self, header: WireHeader) -> bool:
        """Reconnect, and resend the unacknowledged messages or, without any, the header: our last
        acknowledgement may have been lost. Return True if all were sent.
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
        """Open the socket. Raises OSError."""
        public, secret = self._keys
        self._socket: zmq.Socket[bytes] = _socket(self._context, zmq.PUSH)
        self._socket.set(zmq.SNDHWM, MAX_QUEUED + 1)  # One more, for an acknowledgement.
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
            raise OSError(f"{self.address.endpoint!r} cannot be used ({error}).") from error

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
        """Addresses learnt from senders, used until the folder has them."""
        self._num_made = 0

    def to(self, to: str) -> NearLink | FarLink | None:
        """Return the link to the current process of that name; None if there is none."""
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
        """Return the link to a process of another host, or None. `peer`: its last link."""
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
        """Return the last link to a peer; None if there is none."""
        return self._links.get(name)

    def all(self) -> list[tuple[str, NearLink | FarLink]]:
        return list(self._links.items())

    @property
    def is_waiting(self) -> bool:
        """Return whether any link may have to resend messages."""
        return any(isinstance(link, FarLink) and link.is_waiting for link in self._links.values())

    def learn(self, name: str, address: Address) -> None:
        """Note the address that a sender gave."""
        self._learnt[name] = address

    def unlearn(self, name: str) -> None:
        """Forget an address that belonged to an earlier process."""
        self._learnt.pop(name, None)

    def drop(self, name: str) -> None:
        """Close the link to a peer and drop its queue."""
        if (old := self._links.pop(name, None)) is not None:
            old.close()

    def forget(self, name: str) -> None:
        """Drop the messages queued for a peer known to be gone, and its learnt address."""
        self.unlearn(name)
        self.drop(name)

    def close(self) -> None:
        """Close all links; queued messages have a moment to be sent."""
        for link in self._links.values():
            link.close(LINGER_MS)
        self._links.clear()


class WireListener:
    """Listening sockets of a process: one for its host, and a second if the run spans hosts."""

    def __init__(
        self,
        context: zmq.Context[Any],
        folder: Path,
        name: str,
        epoch_number: int,
        network: Network | None,
    ) -> None:
        """Own the name. Raises ConfigError if the folder's path is too long for a Unix socket, or
        if the address is not one of this host's.
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
        """Return the address for other hosts; empty without one."""
        return self._address.endpoint

    def in_turn(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets, in alternating order, so that neither starves the other."""
        self._in_turn.reverse()
        return self._in_turn

    def descriptors(self) -> list[int]:
        """Return descriptors that become readable on new messages, once all old ones were read."""
        return [pull.FD for pull in self._pulls()]

    def wait(self, timeout_ms: int) -> None:
        """Wait for a message or a `wake_on` descriptor."""
        self._poller.poll(timeout_ms)

    def wake_on(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    def wake_on_no_more(self, fd: int) -> None:
        self._poller.unregister(fd)

    def close(self) -> None:
        """Close the sockets and release the name, unless a successor has it."""
        with contextlib.suppress(OSError):
            if identity_of(self._path) == self._identity:  # Otherwise it is a successor's.
                self._path.unlink()
            path = address_path(self._folder, self._name)
            if read_address(path) == self._address:
                path.unlink()
        for pull in self._pulls():
            pull.close(linger=0)

    def _pulls(self) -> list[zmq.Socket[bytes]]:
        return [self.near] if self.far is None else [self.near, self.far]

    def _open_to_hosts(self, context: zmq.Context[Any], network: Network) -> zmq.Socket[bytes]:
        """Listen at the node's address only, and write the address file."""
        pull = _puller(context)
        # Acknowledgements limit senders below this mark. If zmq itself stopped reading, it would
        # miss heartbeats too and take the connection for broken.
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
    """Return the public and the secret half of the key pair of all processes of a deployment."""
    encoded = z85.encode(key_of(secret, PURPOSE))
    return zmq.curve_public(encoded), encoded


def _puller(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    pull: zmq.Socket[bytes] = context.socket(zmq.PULL)
    pull.set(zmq.RCVHWM, MAX_QUEUED)
    pull.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return pull


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """Return a new socket. Raises OSError if the limit of sockets or descriptors is reached."""
    try:
        made: zmq.Socket[bytes] = context.socket(kind)
    except zmq.ZMQError as error:
        raise OSError(f"cannot open a socket ({error}).") from error
    return made


def _beat(socket: zmq.Socket[bytes]) -> None:
    """Have zmq detect an unreachable peer by heartbeats."""
    socket.set(zmq.HEARTBEAT_IVL, BEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.set(zmq.HANDSHAKE_IVL, SILENT_MS)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address

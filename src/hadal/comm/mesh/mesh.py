"""The ranks of a unit as one exchange over TCP: a connection between any two, framed, full duplex,
no rendezvous.

Small messages leave from the calling thread. What has arrived is taken in by whoever waits for it;
while nobody waits (the rank computes), one thread does it, and sends what did not fit at once. So
bytes travel under computation, and a small exchange costs one wake-up.

A formation fails as a whole and at once: by the end of any member's connection, by a deadline, by
a member that says so, or by `abort`. Once PeerLost is raised, no buffer given to it is read or
written any more. Connections outlive a formation; frames of an older one are dropped. Knows no
tokens and no experts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hadal.comm.group import Interval, PeerLost
from hadal.comm.host_waits import HostWaits
from hadal.comm.mesh.link import (
    ABORT,
    CHALLENGE,
    DATA,
    HELLO,
    Frame,
    FrameError,
    Hello,
    Link,
    Owner,
    PauseLink,
    Refusals,
    hello_claim,
    pack_abort,
    pack_challenge,
    pack_header,
    pack_hello,
    unpack_abort,
    unpack_hello,
)
from hadal.core.handshake import NONCE_BYTES, Handshake, is_near
from hadal.core.plans import Member, Waited

# Where the payloads of a formation's exchanges go: into the buffers of an exchange that is
# posted, or into memory of ours until it is.
#
# Knows no sockets. All methods but MeshExchange.wait are called under the group's lock, so none of
# them waits.


MAX_IN_FLIGHT = 8
"""Exchanges posted and not waited for."""
MAX_EARLY_BYTES = 64 << 20
"""Held for exchanges that are not posted here yet, all peers together; beyond it frames wait in the
socket.
"""


class TooLargeError(Exception):
    """A payload does not fit its fixed buffer."""

    def __init__(self, rank: int, num_bytes: int, room: int) -> None:
        super().__init__(f"rank {rank} sent {num_bytes} bytes for a buffer of {room}")


class MeshExchange:
    """One exchange under way. Its fields belong to the group's lock."""

    def __init__(
        self,
        peers: tuple[int, ...],
        recvs: Mapping[int, Tensor] | None,
        wait_for: Callable[[MeshExchange], None],
    ) -> None:
        self.sequence = -1
        self.recvs = recvs
        self.received: dict[int, Tensor] = {}
        """Filled, or being filled while the peer is in `missing`."""
        self.missing = set(peers)
        self.peer_to_arrived_s: dict[int, float] = {}
        self.num_unsent = len(peers)
        self.start_s = self.end_s = time.perf_counter()
        self._peers = peers
        self._wait_for = wait_for

    @property
    def is_done(self) -> bool:
        return not self.missing and not self.num_unsent

    def wait(self) -> dict[int, Tensor]:
        """Return what each peer sent; of fixed buffers the filled prefix. Raises PeerLost."""
        self._wait_for(self)
        return {peer: self.received[peer] for peer in self._peers}

    @property
    def interval(self) -> Interval:
        """Posted, and the last byte received, whether or not anybody waited for it."""
        return Interval(self.start_s, self.end_s)


class Inbox:
    """The exchanges of one formation, by their sequence number."""

    def __init__(self) -> None:
        self.next_sequence = 0
        self._exchanges: dict[int, MeshExchange] = {}
        self._early: dict[tuple[int, int], tuple[Tensor, bool]] = {}
        """(sequence, rank) -> payload of an exchange not posted yet, and whether it is complete."""
        self._early_bytes = 0

    def post(self, exchange: MeshExchange) -> None:
        """Give it the next number and what came early. Raises TooLargeError; ValueError if too many
        are in flight.
        """
        if len(self._exchanges) >= MAX_IN_FLIGHT:
            raise ValueError(f"more than {MAX_IN_FLIGHT} exchanges are in flight.")
        exchange.sequence = self.next_sequence
        self.next_sequence += 1
        self._exchanges[exchange.sequence] = exchange
        for peer in tuple(exchange.missing):
            found = self._early.get((exchange.sequence, peer))
            if found is not None and found[1]:  # If it is still coming, `complete` delivers it.
                self._deliver(exchange, peer)

    def holds(self, exchange: MeshExchange) -> bool:
        return self._exchanges.get(exchange.sequence) is exchange

    def retire(self, exchange: MeshExchange) -> None:
        """Forget an exchange that was waited for."""
        if self.holds(exchange):
            del self._exchanges[exchange.sequence]

    def is_full_for(self, frame: Frame) -> bool:
        """Whether it came early, and too much else has as well."""
        is_early = frame.sequence not in self._exchanges
        return (
            is_early
            and self._early_bytes > 0
            and self._early_bytes + frame.num_bytes > MAX_EARLY_BYTES
        )

    def memory_for(self, rank: int, frame: Frame) -> memoryview:
        """Where a payload goes. Raises TooLargeError, and FrameError if it cannot be."""
        exchange = self._exchanges.get(frame.sequence)
        if exchange is None:
            return self._early_memory_for(rank, frame)
        if rank not in exchange.missing or rank in exchange.received:
            raise FrameError(f"a second payload for exchange {frame.sequence}")
        if exchange.recvs is None:
            tensor = torch.empty(frame.num_bytes, dtype=torch.uint8)
        else:
            tensor = _prefix(exchange.recvs[rank], rank, frame.num_bytes)
        exchange.received[rank] = tensor
        return bytes_of(tensor)

    def _early_memory_for(self, rank: int, frame: Frame) -> memoryview:
        # A peer waits for us before it can be further ahead than what it may have in flight.
        if not self.next_sequence <= frame.sequence <= self.next_sequence + MAX_IN_FLIGHT:
            raise FrameError(
                f"data of exchange {frame.sequence}, while {self.next_sequence} is next"
            )
        if (frame.sequence, rank) in self._early:
            raise FrameError(f"a second payload for exchange {frame.sequence}")
        self._early_bytes += frame.num_bytes
        tensor = torch.empty(frame.num_bytes, dtype=torch.uint8)
        self._early[frame.sequence, rank] = (tensor, False)
        return bytes_of(tensor)

    def complete(self, rank: int, frame: Frame) -> None:
        """The payload is in the memory that `memory_for` gave. Raises TooLargeError."""
        exchange = self._exchanges.get(frame.sequence)
        key = (frame.sequence, rank)
        if exchange is None:
            self._early[key] = (self._early[key][0], True)
        elif key in self._early:
            self._deliver(exchange, rank)
        else:
            _arrived(exchange, rank)

    def _deliver(self, exchange: MeshExchange, rank: int) -> None:
        early, _ = self._early.pop((exchange.sequence, rank))
        self._early_bytes -= early.numel()
        if exchange.recvs is not None:
            buffer = _prefix(exchange.recvs[rank], rank, early.numel())
            # Not by torch: a buffer made in inference mode may be written in that mode alone, and
            # modes are a thread's.
            bytes_of(buffer)[:] = bytes_of(early)
            early = buffer
        exchange.received[rank] = early
        _arrived(exchange, rank)


def _arrived(exchange: MeshExchange, rank: int) -> None:
    exchange.missing.discard(rank)
    exchange.end_s = exchange.peer_to_arrived_s[rank] = time.perf_counter()


def bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def _prefix(buffer: Tensor, rank: int, num_bytes: int) -> Tensor:
    if num_bytes > buffer.numel():
        raise TooLargeError(rank, num_bytes, buffer.numel())
    return buffer[:num_bytes]


# The sockets of the TCP mesh: a listener, its links, and whose turn it is to poll them.
#
# While a thread waits (`with turn`), it polls for itself, so that what arrives costs one wake-up;
# at all other times the poller's own thread does. Knows no frames and no members.


POLL_S = 0.5
JOIN_TIMEOUT_S = 5.0
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class HolderLock:
    """A lock that knows who holds it: held by a thread for as long as it waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder_id = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder_id = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder_id = 0
        self._lock.release()

    def acquire(self, timeout_s: float) -> bool:
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        self._lock.release()

    def is_of_another(self) -> bool:
        """Whether a thread other than the caller's has it, or is just taking it."""
        return self._lock.locked() and self._holder_id != threading.get_ident()


class Poller:
    """Listens from birth. `on_accept(link)` is called for every connection that comes in.

    `congestion`: TCP congestion control; None: reno on a loopback address, where the pacing of
    others costs throughput, and the host's own elsewhere.
    """

    def __init__(
        self,
        name: str,
        host: str,
        owner: Owner,
        on_accept: Callable[[Link], None],
        congestion: str | None,
        key: bytes,
    ) -> None:
        self.turn = HolderLock()
        self._host = host
        self._owner = owner
        self._on_accept = on_accept
        self._key = key
        self._congestion = congestion or ("reno" if is_near(host) else None)
        self._is_closing = False
        self._links: dict[int, Link] = {}
        self._doomed: list[Link] = []
        """Broken, to be closed where no lock is held."""
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=256)
        self._listener.setblocking(False)
        self._listener_fd = self._listener.fileno()
        self.port: int = self._listener.getsockname()[1]
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._listener_fd, select.EPOLLIN)
        self._poll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def connect(self, host: str, port: int, rank: int, epoch: str) -> tuple[Link, str]:
        """Begin to connect; the link may be sent on at once. Returns it, and why it cannot be (or
        "").
        """
        sock = socket.socket(_family(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._prepare(sock)
        link = Link(sock, self._owner, self._handshake(host, port, is_connector=True), rank, epoch)
        try:
            # From the address it listens on: links are told apart by it, and a host may have
            # several.
            sock.bind((self._host, 0))
            error = sock.connect_ex((host, port))
        except OSError as raised:
            error = raised.errno or errno.EIO
        self._links[link.fd] = link
        if error not in (0, errno.EINPROGRESS):
            return link, f"cannot connect: {os.strerror(error)}"
        self._poll.register(link.fd, _EVENTS)
        link.send(pack_challenge(link.handshake.nonce))
        return link, ""

    def doom(self, link: Link) -> None:
        """End a connection; its socket is closed later, because whoever calls may hold a link's
        lock.
        """
        link.is_broken = True
        with contextlib.suppress(
            OSError
        ):  # It may never have been connected, or is closed already.
            link.sock.shutdown(socket.SHUT_RDWR)
        self._doomed.append(link)

    def reap(self) -> None:
        """Close what is doomed. With no lock held."""
        while self._doomed:
            try:
                link = self._doomed.pop()
            except IndexError:
                return  # Another thread was faster.
            if self._links.get(link.fd) is link:
                del self._links[link.fd]
            link.close()

    def pump(self, timeout_s: float) -> None:
        """Wait for something to happen, and see to it."""
        for fd, mask in self._poll.poll(timeout_s):
            link = self._links.get(fd)
            if link is not None:
                if mask & select.EPOLLOUT:
                    link.flush()
                if mask & ~select.EPOLLOUT:
                    link.receive(bool(mask & _HUNG_UP))
            elif fd == self._listener_fd:
                self._accept()
        if self._doomed:
            self.reap()

    def wake(self) -> None:
        """If another thread waits: let it look again. Who moved the bytes itself looks anyway."""
        if self.turn.is_of_another() or self._is_closing:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """End the thread and every connection."""
        self._is_closing = True
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
        self._doomed += self._links.values()
        self.reap()
        self._listener.close()
        # A thread that still waits has been notified, and leaves the poll first.
        if self.turn.acquire(JOIN_TIMEOUT_S):
            if not self._thread.is_alive():
                self._poll.close()
                os.close(self._wake_fd)
            self.turn.release()

    def _run(self) -> None:
        while not self._is_closing:
            with self.turn:
                pass  # Whoever waits polls, and every wait has a deadline.
            self.pump(POLL_S)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # Another thread was faster, or it has gone again.
        sock.setblocking(False)
        self._prepare(sock)
        link = Link(sock, self._owner, self._handshake(address[0], self.port, is_connector=False))
        self._links[link.fd] = link
        self._on_accept(link)
        if not link.is_broken:
            # In this order: whoever connects may be gone already, so sending may break the link,
            # and then another thread may close it at once.
            self._poll.register(link.fd, _EVENTS)
            link.send(pack_challenge(link.handshake.nonce))

    def _handshake(self, host: str, port: int, *, is_connector: bool) -> Handshake:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Handshake(
            self._key, nonce, is_connector=is_connector, port=port, is_sealed=not is_near(host)
        )

    def _prepare(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._congestion is not None:
            with contextlib.suppress(
                OSError
            ):  # This kernel does not allow it: then the host's own.
                sock.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._congestion.encode()
                )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


PURPOSE = "mesh 2"
"""Purpose of the key (core/handshake.key_of)."""
MAX_PENDING = 256
"""Accepted connections that have not said who they are, or are ahead of us."""


class MeshGroup:
    """A rank's end of the mesh. Listens from birth; `port` is where peers connect.

    `form`, `exchange` and `wait` are called by one thread; `abort`, `lost` and `close` by any.
    `on_lost(rank)` is called once per rank and formation, by the mesh's thread or the one that
    waits: it is short and does not call back.
    """

    def __init__(
        self,
        rank: int,
        epoch: str,
        *,
        key: bytes,
        host: str = "127.0.0.1",
        deadline_s: float,
        on_lost: Callable[[int], None] | None = None,
        congestion: str | None = None,
    ) -> None:
        """`key`: the deployment's for PURPOSE; who does not hold it is refused (core/handshake)."""
        self.rank = rank
        self.epoch = epoch
        self.members: tuple[int, ...] = (rank,)
        self.formation = -1
        self.deadline_s = deadline_s
        self.bytes_sent = 0
        """Bytes of the payloads of exchanges; their headers are not counted."""
        self.bytes_received = 0
        self.refusals = Refusals("mesh", f"rank {rank}")
        self._on_lost = on_lost
        self._peers: tuple[int, ...] = ()
        self._epochs: dict[int, str] = {}
        self._lock = threading.Lock()
        """Held for table look-ups only: never while bytes move."""
        self._links: dict[int, Link] = {}
        self._pending: list[Link] = []
        self._inbox = Inbox()
        self._failure: tuple[tuple[int, ...], str] | None = ((), "no formation was formed")
        self._abort = b""
        """The message to the peers of this formation that it failed; empty while it has not, or if
        they know.
        """
        self._lost: set[int] = set()
        self._waits = HostWaits()
        self._is_closing = False
        self._poller = Poller(f"mesh-{rank}", host, self, self._accepted, congestion, key)
        self.port = self._poller.port
        self._poller.start()

    # ---- what a rank calls ----
    def form(self, formation: int, members: Sequence[Member]) -> None:
        """Start a formation. Raises PeerLost naming who is not reached within the deadline, and
        ValueError.
        """
        others = {member.rank: member for member in members if member.rank != self.rank}
        if self.rank not in {member.rank for member in members}:
            raise ValueError(f"rank {self.rank} is not among the members of formation {formation}.")
        if formation <= self.formation:
            raise ValueError(f"formation {formation} is not newer than {self.formation}.")
        self._waits.form(self.rank, members)
        with self._poller.turn:
            self._start_formation(formation, others)
            deadline_s = time.monotonic() + self.deadline_s
            for rank, member in sorted(others.items()):
                self._greet(rank, member)
            while missing := [rank for rank in sorted(others) if not self._is_ready(rank)]:
                self._raise_failure()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self._fail(tuple(missing), f"not reached within {self.deadline_s} s")
                    continue
                self._poller.pump(min(left_s, POLL_S))
            self._raise_failure()

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> MeshExchange:
        """See Group. Raises PeerLost if the formation has failed already."""
        self._raise_failure()
        peers = self._peers
        if sends.keys() != set(peers) or (recvs is not None and recvs.keys() != set(peers)):
            raise ValueError(f"an exchange needs a tensor for each of {peers}, and no other.")
        views = {peer: bytes_of(sends[peer]) for peer in peers}
        exchange = MeshExchange(peers, recvs, self._wait_for)
        try:
            with self._lock:
                self._inbox.post(exchange)
                links = [self._links[peer] for peer in peers]
        except TooLargeError as error:
            self._fail((), str(error))
            self._raise_failure()
        # The next rank first: if all began with rank 0, it would be everybody's bottleneck.
        at = sum(peer < self.rank for peer in peers)
        num_sent = 0
        for link in links[at:] + links[:at]:
            view = views[link.rank]
            head = pack_header(DATA, self.formation, exchange.sequence, len(view))
            self.bytes_sent += len(view)
            num_sent += link.send(head, view, exchange)
        with self._lock:
            exchange.num_unsent -= num_sent
        for link in links:
            if link.is_paused:
                link.receive()
        return exchange

    def abort(self) -> None:
        """Fail this formation's exchanges, or its forming, now; the other members learn of it."""
        self._fail((), "aborted")

    def lost(self) -> tuple[int, ...]:
        """Members whose connection ended in this formation."""
        with self._lock:
            return tuple(sorted(self._lost))

    def take_waits(self) -> Waited:
        """See Group."""
        return self._waits.take()

    def close(self) -> None:
        """End every connection and the thread. The other members see a loss."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._failure = self._failure or ((), "closed")
        self._poller.close()

    def _wait_for(self, exchange: MeshExchange) -> None:
        """Return when the exchange is done. Raises PeerLost."""
        if not exchange.is_done:
            began_s = time.perf_counter()
            deadline_s = time.monotonic() + self.deadline_s
            with self._poller.turn:
                while (
                    not exchange.is_done and self._failure is None and self._inbox.holds(exchange)
                ):
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        self._time_out(exchange)
                    else:
                        self._poller.pump(min(left_s, POLL_S))
            self._waits.add(began_s, time.perf_counter(), exchange.peer_to_arrived_s)
            if not exchange.is_done:
                self._raise_failure()
                raise PeerLost((), "the exchange is of an older formation")
        with self._lock:
            self._inbox.retire(exchange)

    def _time_out(self, exchange: MeshExchange) -> None:
        with self._lock:
            # Those who did not deliver; if all did, those who do not take what is sent to them.
            silent = exchange.missing or {
                rank for rank, link in self._links.items() if link.is_sending
            }
        self._fail(tuple(sorted(silent)), f"nothing within {self.deadline_s} s")

    # ---- what links report: mesh_link.Owner ----
    def begin(self, link: Link, frame: Frame) -> memoryview | None:
        """Where a payload goes: to its exchange, or nowhere if it is of an older formation."""
        if not link.is_proven and frame.kind not in (CHALLENGE, HELLO):
            raise FrameError("it has not proven itself")
        if frame.kind != DATA:
            return memoryview(bytearray(frame.num_bytes))
        try:
            with self._lock:
                if link.formation < frame.formation or frame.formation > self.formation:
                    raise FrameError(f"data of formation {frame.formation} before its HELLO")
                if frame.formation < self.formation or self._failure is not None:
                    return None
                # Decided under the lock: whoever posts the exchange afterwards sees it, and lets
                # the link go on.
                link.is_paused = self._inbox.is_full_for(frame)
                if link.is_paused:
                    raise PauseLink
                return self._inbox.memory_for(link.rank, frame)
        except TooLargeError as error:
            self._fail((), str(error), formation=frame.formation)
            return None

    def ended(self, link: Link, frame: Frame, payload: memoryview | None) -> None:
        """A frame is complete."""
        if payload is None:
            return
        if frame.kind == CHALLENGE:
            with self._lock:
                link.challenged(bytes(payload))
                is_hello_due, link.is_hello_due = link.is_hello_due, False
            if is_hello_due:
                self._say_hello(link)
        elif frame.kind == HELLO:
            hello, claim, proof = unpack_hello(frame.formation, bytes(payload))
            if not link.handshake.is_proof(proof, claim):
                raise FrameError("it does not hold this deployment's secret")
            link.is_proven = True
            self._hello(link, frame.formation, hello)
        elif frame.kind == ABORT:
            ranks, reason = unpack_abort(bytes(payload))
            link.aborted = (frame.formation, ranks, f"rank {link.rank}: {reason}")
            self._heed_abort(link)
        else:
            try:
                with self._lock:
                    if frame.formation != self.formation or self._failure is not None:
                        return
                    self.bytes_received += frame.num_bytes
                    self._inbox.complete(link.rank, frame)
            except TooLargeError as error:
                self._fail((), str(error), formation=frame.formation)
            self._poller.wake()

    def sent(self, exchange: MeshExchange) -> None:
        """The rest of an exchange's frame has left."""
        with self._lock:
            exchange.num_unsent -= 1
        self._poller.wake()

    def broken(self, link: Link, reason: str) -> None:
        """The end of a connection."""
        with self._lock:
            if link.is_broken:
                return
            self._poller.doom(link)
            if link in self._pending:
                self._pending.remove(link)
            is_member = (
                self._links.get(link.rank) is link
                and link.rank in self._peers
                and not self._is_closing
            )
            is_news = is_member and link.rank not in self._lost
            if is_news:
                self._lost.add(link.rank)
            formation = self.formation
        if not link.is_proven and link.rank < 0:
            self.refusals.count(reason)
        if is_news:
            self._fail((link.rank,), reason, formation=formation)
            if self._on_lost is not None:
                self._on_lost(link.rank)

    # ---- forming ----
    def _start_formation(self, formation: int, others: Mapping[int, Member]) -> None:
        """Drop all of the formation before, and the connections that are not wanted any more."""
        with self._lock:
            if self._is_closing:
                raise PeerLost((), "closed")
            self.formation, self._failure, self._abort = formation, None, b""
            self._peers = tuple(sorted(others))
            self.members = tuple(sorted({self.rank, *others}))
            self._epochs = {rank: member.epoch for rank, member in others.items()}
            self._lost.clear()
            self._inbox = Inbox()
            stale = [
                link
                for rank, link in self._links.items()
                if rank not in others or link.epoch != others[rank].epoch or link.is_broken
            ]
            for link in stale:
                del self._links[link.rank]
            late = [link for link in self._pending if link.rank >= 0 and link.formation < formation]
            self._pending = [link for link in self._pending if link not in late]
            for link in stale + late:
                if not link.is_broken:
                    self._poller.doom(link)
        # Only now: until the formation had changed, a frame of the one before could still begin.
        self._retire()
        self._poller.reap()

    def _greet(self, rank: int, member: Member) -> None:
        """Say HELLO on the connection there is, or make one; peers of a lower rank make theirs."""
        with self._lock:
            waiting = [
                link for link in self._pending if (link.rank, link.epoch) == (rank, member.epoch)
            ]
            link = self._links.get(rank)
        if waiting:
            self._adopt(waiting[-1])
            link = waiting[-1]
        elif link is not None:
            self._say_hello(link)
        elif self.rank < rank:
            link, reason = self._poller.connect(member.host, member.port, rank, member.epoch)
            with self._lock:
                self._links[rank] = link
            if reason:
                self.broken(link, reason)
            else:
                self._say_hello(link)
        if link is not None:
            self._heed_abort(link)
            if link.formation > self.formation:
                self._fail(
                    (), f"rank {rank} is in formation {link.formation} already", notifies=False
                )

    def _accepted(self, link: Link) -> None:
        with self._lock:
            self._pending.append(link)
            # Those who have shown who they are stay, so that strangers who only connect push nobody
            # out.
            unproven = (other for other in self._pending if not other.is_proven)
            oldest = next(unproven, self._pending[0]) if len(self._pending) > MAX_PENDING else None
        if oldest is not None:
            self.broken(oldest, "too many connections")

    def _say_hello(self, link: Link) -> None:
        with self._lock:
            formation = self.formation
            link.is_hello_due = not link.handshake.is_challenged
            if link.is_hello_due:
                return
        claim = hello_claim(formation, Hello(self.rank, self.epoch, link.rank, link.epoch))
        link.send(pack_hello(formation, claim, link.handshake.proof(claim)))
        with self._lock:
            link.said_formation = max(link.said_formation, formation)
            abort = self._abort if formation == self.formation else b""
        if abort:
            link.send(abort)

    def _hello(self, link: Link, formation: int, hello: Hello) -> None:
        """A peer is in `formation`. Raises FrameError if it is not who it should be, or takes us
        for another.
        """
        if (hello.to_rank, hello.to_epoch) != (self.rank, self.epoch):
            raise FrameError(
                f"rank {hello.rank} looks for rank {hello.to_rank} ({hello.to_epoch}) here"
            )
        is_new = link.rank < 0
        if not is_new and (hello.rank, hello.epoch) != (link.rank, link.epoch):
            raise FrameError(
                f"rank {link.rank} ({link.epoch}) calls itself {hello.rank} ({hello.epoch})"
            )
        if is_new and formation < self.formation:
            raise FrameError(f"rank {hello.rank} is still in formation {formation}")
        with self._lock:
            link.rank, link.epoch = hello.rank, hello.epoch
            link.formation = max(link.formation, formation)
            is_expected = (
                formation == self.formation and self._epochs.get(hello.rank) == hello.epoch
            )
            ours = self.formation
            is_ahead = formation > ours and self._links.get(hello.rank) is link
        if is_ahead:  # It has given up ours.
            self._fail(
                (),
                f"rank {hello.rank} is in formation {formation} already",
                notifies=False,
                formation=ours,
            )
        elif is_new and is_expected:
            self._adopt(link)
        self._poller.wake()

    def _adopt(self, link: Link) -> None:
        """A peer's connection becomes the one to it."""
        with self._lock:
            if link not in self._pending:
                return
            self._pending.remove(link)
            old = self._links.get(link.rank)
            self._links[link.rank] = link
            if old is not None and not old.is_broken:
                self._poller.doom(old)
        self._say_hello(link)

    def _is_ready(self, rank: int) -> bool:
        link = self._links.get(rank)
        return link is not None and link.formation == self.formation

    # ---- failing ----
    def _heed_abort(self, link: Link) -> None:
        formation, ranks, reason = link.aborted
        if formation == self.formation and self._links.get(link.rank) is link:
            self._fail(ranks, reason, notifies=False, formation=formation)

    def _fail(
        self,
        ranks: tuple[int, ...],
        reason: str,
        *,
        notifies: bool = True,
        formation: int | None = None,
    ) -> None:
        """End the formation, if it has not ended. The thread that waits raises PeerLost; the peers
        are notified.

        `formation`: the one that the caller saw fail; another may have begun since, and goes on.
        """
        with self._lock:
            if self._failure is not None or formation not in (None, self.formation):
                return
            formation = self.formation
            self._failure = (ranks, reason)
            self._abort = pack_abort(formation, ranks, reason) if notifies else b""
            # To the others it goes behind their HELLO: who hears anything before it takes us for a
            # stranger.
            links = [
                link
                for rank in self._peers
                if (link := self._links.get(rank)) is not None and link.said_formation == formation
            ]
            abort = self._abort
        if abort:
            for link in links:
                link.send(abort)
        self._poller.wake()

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            self._retire()
            raise PeerLost(*failure)

    def _retire(self) -> None:
        """After it no buffer of this formation is read or written."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.retire()

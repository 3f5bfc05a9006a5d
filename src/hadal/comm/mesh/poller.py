"""Sockets of the TCP mesh: a listener, its links, and the choice of the thread that polls them.

A thread that waits (`with turn`) polls itself, so that arriving data cost one wake-up; otherwise
the poller's own thread polls. Does not depend on members, nor on frames except
the CHALLENGE that begins a connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable

from hadal.comm.mesh.frames import pack_challenge
from hadal.comm.mesh.link import Link, Owner
from hadal.core.handshake import NONCE_BYTES, Handshake, is_near

POLL_S = 0.5
JOIN_TIMEOUT_S = 5.0
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class HolderLock:
    """Lock that records its holder: the thread that waits for data and polls."""

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
        """Return whether a thread other than the caller has the lock or is acquiring it."""
        return self._lock.locked() and self._holder_id != threading.get_ident()


class Poller:
    """Listener and links. It listens from its creation. `on_accept(link)` is called for every
    accepted connection.

    `congestion`: TCP congestion control. None: reno on a loopback address, where pacing by other
    algorithms costs throughput, and the host's default elsewhere.
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
        """Broken links, to be closed while no lock is held."""
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
        """Start to connect. Return the link, which accepts frames at once, and the error (or "")."""
        sock = socket.socket(_family(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._prepare(sock)
        link = Link(sock, self._owner, self._handshake(host, port, is_connector=True), rank, epoch)
        try:
            # Bind the listener's address: peers identify links by it, and a host may have several.
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
        """Shut down a connection. Its socket closes later: the caller may hold a link's lock."""
        link.is_broken = True
        with contextlib.suppress(OSError):  # Never connected, or closed already.
            link.sock.shutdown(socket.SHUT_RDWR)
        self._doomed.append(link)

    def reap(self) -> None:
        """Close broken links. No lock may be held."""
        while self._doomed:
            try:
                link = self._doomed.pop()
            except IndexError:
                return  # Another thread was faster.
            if self._links.get(link.fd) is link:
                del self._links[link.fd]
            link.close()

    def pump(self, timeout_s: float) -> None:
        """Wait for events and handle them."""
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
        """Wake another thread if it waits. A thread that moved the bytes itself checks anyway."""
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
        # A thread that still waits has been notified; let it leave the poll first.
        if self.turn.acquire(JOIN_TIMEOUT_S):
            if not self._thread.is_alive():
                self._poll.close()
                os.close(self._wake_fd)
            self.turn.release()

    def _run(self) -> None:
        while not self._is_closing:
            with self.turn:
                pass  # Leave polling to a waiting thread; every wait has a deadline.
            self.pump(POLL_S)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # Another thread was faster, or the peer is gone.
        sock.setblocking(False)
        self._prepare(sock)
        link = Link(sock, self._owner, self._handshake(address[0], self.port, is_connector=False))
        self._links[link.fd] = link
        self._on_accept(link)
        if not link.is_broken:
            # Register before sending: the peer may be gone already, so sending may break the link,
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
            with contextlib.suppress(OSError):  # Not permitted by this kernel: use the host's own.
                sock.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._congestion.encode()
                )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

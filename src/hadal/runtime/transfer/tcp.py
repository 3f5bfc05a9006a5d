"""Pulls over TCP: one connection to the owner's server, kept between pulls; chunks straight into
own blocks.

A chunk counts once its checksum is right. A connection that breaks is made anew and asked for the
chunks that are missing; a silent owner is given up. When `pull` returns, the connection is idle or
closed: nothing more can arrive.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

from hadal.comm.mesh.link import Refusals
from hadal.core.handshake import key_of
from hadal.core.messages import KvLease
from hadal.runtime.transfer.frames import (
    CHUNK,
    END,
    FREED,
    PURPOSE,
    REFUSED,
    SILENCE_S,
    About,
    AboutNixl,
    AskNixl,
    BadPeer,
    PullChunks,
    blocks_per_chunk,
    check_about,
    checksum,
    connect,
    receive_bytes,
    receive_frame,
    receive_head,
    send_chunk,
    send_frame,
)
from hadal.runtime.transfer.grants import Grants
from hadal.runtime.transfer.nixl import NixlAgent
from hadal.runtime.transfer.peers import MAX_UNPROVEN, Channel, NotProven, accept_channel
from hadal.runtime.transfer.pool import FREED_DURING, KvPool, PoolAddress, PoolError

# A pool's server: sends leased blocks to whoever of the run asks over TCP, and says how NIXL can
# read them.
#
# A thread accepts, and each connection has one of its own that ends with it: when the other closes
# or dies, is silent for IDLE_S between asks, or takes nothing for SILENCE_S in the middle of one. A
# chunk's checksum is taken before it is sent and counts if no block of it was freed until then, so
# bytes that change on their way are void by themselves; all versions are looked at again after
# the last byte.
#
# Whoever asks has proven itself and shows that the blocks are leased to it
# (runtime/transfer/grants). Knows leases' blocks and versions, nothing of requests.


log = logging.getLogger(__name__)

IDLE_S = 120.0
"""A connection without asks is closed; its puller makes another when it needs one."""
MAX_CONNECTIONS = 128
"""Served at once; more wait to be accepted. One for every rank that pulls."""


class KvServer:
    """Answers from threads of its own until closed. `port` is where."""

    def __init__(
        self,
        pool: KvPool,
        host: str,
        secret: bytes,
        grants: Grants,
        *,
        lease_s: float,
        nixl: NixlAgent | None = None,
    ) -> None:
        """`lease_s`: no answer takes longer. `nixl`: None where it cannot be had or is not
        wanted.
        """
        self.refusals = Refusals("kv", f"the KV pool {pool.name}")
        self._pool = pool
        self._key = key_of(secret, PURPOSE)
        self._grants = grants
        self._lease_s = lease_s
        self._nixl = nixl
        self._listener = socket.create_server((host, 0), backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self.address = str(PoolAddress(pool.name, pool.birth, host, self.port))
        """Address of the server, as leases name it."""
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._talks: dict[socket.socket, threading.Thread] = {}
        self._unproven: dict[socket.socket, None] = {}
        """Those of them that have not proven themselves yet, the oldest first."""
        self._stopping = False
        self._thread = threading.Thread(target=self._accept, name="kv-server", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._talks)

    def close(self, timeout_s: float) -> bool:
        """Break off what is being sent and free the port. False if a thread has not ended within
        `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._stopping = True
            talks = dict(self._talks)
        _shut(self._listener)  # Wakes the thread that accepts.
        for connection in talks:
            _shut(connection)
        for thread in (self._thread, *talks.values()):
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._listener.close()
        return not any(thread.is_alive() for thread in (self._thread, *talks.values()))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                log.warning(
                    "a connection for KV was refused: %s", error
                )  # Gone again, or no descriptor left.
                time.sleep(SILENCE_S)
                continue
            thread = threading.Thread(
                target=self._talk, args=(connection,), name="kv-send", daemon=True
            )
            with self._lock:
                if self._stopping:
                    connection.close()
                    return
                try:
                    thread.start()
                except (
                    RuntimeError
                ) as error:  # No more threads may be had: the next one may be served again.
                    log.warning("a connection for KV was refused: %s", error)
                    connection.close()
                    continue
                self._talks[connection] = thread
                self._unproven[connection] = None
                oldest = next(iter(self._unproven)) if len(self._unproven) > MAX_UNPROVEN else None
            if oldest is not None:
                _shut(oldest)  # Whoever only connects takes nobody's place.

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._prove(connection)
        except NotProven as error:  # What came later was changed on its way.
            self.refusals.count(error)
        except (OSError, BadPeer) as error:  # A deadline's TimeoutError is one.
            log.debug("a puller is gone: %r", error)
        except Exception:
            log.exception("KV could not be sent")  # Its puller has the request computed again.
        finally:
            with self._lock:
                self._talks.pop(connection)

    def _prove(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = accept_channel(connection, self._key, time.monotonic() + SILENCE_S, SILENCE_S)
        except (
            OSError
        ) as error:  # Silence as well: whoever takes a place and says nothing is counted.
            if not self._stopping:
                self.refusals.count(error)
            return
        finally:
            with self._lock:
                self._unproven.pop(connection)
        # Places are for those who proved themselves.
        if not self._room.acquire(timeout=SILENCE_S):
            log.warning("a connection for KV was refused: %d are served", MAX_CONNECTIONS)
            return
        try:
            self._serve(channel)
        finally:
            self._room.release()

    def _serve(self, connection: Channel) -> None:
        pool = self._pool
        send_frame(
            connection, About(pool.name, pool.birth, pool.shape, pool.dtype, self._nixl is not None)
        )
        while not self._stopping:
            ask = receive_frame(connection, time.monotonic() + IDLE_S, IDLE_S)
            if isinstance(ask, PullChunks):
                self._send(connection, ask, time.monotonic() + self._lease_s)
            elif isinstance(ask, AskNixl) and self._nixl is not None:
                send_frame(connection, self._nixl.about(pool))
            else:
                raise BadPeer(f"it sends {type(ask).__name__}")

    def _send(self, connection: Channel, ask: PullChunks, deadline_s: float) -> None:
        pool, per_chunk = self._pool, blocks_per_chunk(self._pool.block_bytes)
        ids, versions = ask.block_ids, ask.versions
        num_chunks = -(-len(ids) // per_chunk)
        is_sound = len(ids) == len(versions) and all(0 <= i < pool.num_blocks for i in ids)
        is_granted = self._grants.allows(ask.grant, connection.name, self.address, ids, versions)
        if not is_granted:
            self.refusals.count(f"{connection.name} asks for blocks that are not leased to it")
        if (
            not is_granted
            or not is_sound
            or not all(0 <= chunk < num_chunks for chunk in ask.chunks)
        ):
            send_chunk(connection, REFUSED, deadline_s)
            return
        for chunk in ask.chunks:
            part = slice(chunk * per_chunk, (chunk + 1) * per_chunk)
            views = pool.views(ids[part])
            digest = checksum(views)
            if not pool.holds(ids[part], versions[part]):
                send_chunk(connection, FREED, deadline_s)
                return
            send_chunk(connection, CHUNK, deadline_s, chunk, views, digest)
        send_chunk(connection, END if pool.holds(ids, versions) else FREED, deadline_s)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("it was gone already: %s", error)


TRIES = 3
"""One, and again twice: a connection that was idle may have been closed, and one more may break."""
NIXL_START_S = 6.0
"""The owner makes its agent when first asked for it, which takes long where cores are short."""


class KvLink:
    """Connection to one pool's server. One thread at a time may use it."""

    def __init__(self, address: PoolAddress, key: bytes, grants: Grants) -> None:
        self._address = address
        self._key = key
        self._grants = grants
        self._connection: Channel | None = None
        self._about: About | None = None

    def about(self, deadline_s: float) -> About:
        """The pool, connecting first if that was not done yet. Raises OSError, BadPeer,
        PoolError.
        """
        if self._about is None or self._connection is None:
            self._connect(deadline_s)
        assert self._about is not None
        return self._about

    def ask_nixl(self, deadline_s: float) -> AboutNixl:
        """How NIXL can read the pool. Raises OSError, BadPeer, PoolError."""
        for is_last in (False, True):
            try:
                connection = self._connect(deadline_s)
                send_frame(connection, AskNixl())
                answer = receive_frame(connection, deadline_s, NIXL_START_S)
                if not isinstance(answer, AboutNixl):
                    raise BadPeer(f"it answers with {type(answer).__name__}")
                return answer
            except ConnectionError:
                self.close()
                if is_last:
                    raise
            except (OSError, BadPeer):
                self.close()
                raise
        raise AssertionError("unreachable")

    def pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        """Copy and verify leased blocks. Returns None, or why the copy is void. Raises OSError,
        BadPeer, PoolError.
        """
        missing = set(range(-(-len(into) // blocks_per_chunk(own.block_bytes))))
        for number in range(TRIES):
            try:
                connection = self._connect(deadline_s)
                assert self._about is not None
                wrong = own.mismatch(
                    self._address.name, self._about.shape, self._about.dtype, lease, into
                )
                if wrong is not None:
                    return wrong
                send_frame(connection, self._ask(lease, missing))
                is_freed = self._receive(connection, own, into, missing, deadline_s)
            except ConnectionError as error:
                self.close()
                if number == TRIES - 1 or isinstance(error, ConnectionRefusedError | NotProven):
                    raise
                log.debug("%s: %s; %d chunks are missing", self._address.name, error, len(missing))
                continue
            except (OSError, BadPeer, PoolError):
                self.close()
                raise
            if is_freed:
                return FREED_DURING
            if not missing:
                return None
        return f"{len(missing)} chunks from {self._address.name} do not add up to their checksums"

    def interrupt(self) -> None:
        """Make the pull under way, if any, fail soon. From any thread."""
        connection = self._connection
        if connection is not None:
            try:
                connection.connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("it was gone already: %s", error)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, lease: KvLease, chunks: set[int]) -> PullChunks:
        return PullChunks(
            lease.block_ids, lease.versions, tuple(sorted(chunks)), self._grants.of(lease)
        )

    def _connect(self, deadline_s: float) -> Channel:
        if self._connection is None:
            address = self._address
            self._connection, self._about = connect(
                address.host, address.port, self._key, self._grants.name, deadline_s
            )
            check_about(self._about, address.name, address.birth)
        return self._connection

    def _receive(
        self,
        connection: Channel,
        own: KvPool,
        into: tuple[int, ...],
        missing: set[int],
        deadline_s: float,
    ) -> bool:
        """Fill what comes into own blocks and take the sound chunks out of `missing`. True: blocks
        were freed.
        """
        per_chunk, asked = blocks_per_chunk(own.block_bytes), set(missing)
        while True:
            kind, chunk, num_bytes, digest = receive_head(connection, deadline_s)
            if kind == CHUNK:
                part = into[chunk * per_chunk : (chunk + 1) * per_chunk]
                if chunk not in asked or num_bytes != len(part) * own.block_bytes:
                    raise BadPeer(f"it sends {num_bytes} bytes as chunk {chunk}")
                asked.discard(chunk)
                views = own.views(part)
                receive_bytes(connection, views, deadline_s)
                if checksum(views) == digest:
                    missing.discard(chunk)
                else:
                    log.warning(
                        "chunk %d from %s does not add up to its checksum",
                        chunk,
                        self._address.name,
                    )
            elif kind in (END, FREED):
                if kind == END and asked:
                    raise BadPeer(f"it ends with {len(asked)} chunks to come")
                return kind == FREED
            else:
                raise BadPeer("it refuses the lease")

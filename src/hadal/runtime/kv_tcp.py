"""Pulls over TCP: one connection to the owner's server, kept between pulls; chunks straight into
own blocks.

A chunk counts once its checksum is right. A connection that breaks is made anew and asked for the
chunks that are missing; a silent owner is given up. When `pull` returns, the connection is idle or
closed: nothing more can arrive.
"""

from __future__ import annotations

import logging
import socket

from hadal.core.messages import KvLease
from hadal.runtime.grants import Grants
from hadal.runtime.kv_frames import (
    CHUNK,
    END,
    FREED,
    About,
    AboutNixl,
    Ask,
    AskNixl,
    BadPeer,
    blocks_per_chunk,
    check_about,
    checksum,
    connect,
    receive_bytes,
    receive_frame,
    receive_head,
    send_frame,
)
from hadal.runtime.kv_pool import FREED_DURING, KvPool, PoolAddress, PoolError
from hadal.runtime.peers import Channel, NotProven

log = logging.getLogger(__name__)

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

    def _ask(self, lease: KvLease, chunks: set[int]) -> Ask:
        return Ask(
            lease.block_ids, lease.generations, tuple(sorted(chunks)), self._grants.of(lease)
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

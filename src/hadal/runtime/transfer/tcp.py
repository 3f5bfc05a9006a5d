"""KV over TCP: a pool's server sends leased blocks to other processes of the run, and a puller
receives them straight into its own blocks (runtime/transfer/peers moves the frames).

             <-  AboutPool                             once, after the handshake
    PullChunks  ->
             <-  ChunkHead, bytes                      for every requested chunk
             <-  ChunksEnd                             after a last check of all versions
    AskNixl  ->
             <-  AboutNixl

Chunk i is blocks [i*n, (i+1)*n) of the lease, n = blocks_per_chunk. The server computes its
checksum, then checks that none of its blocks was freed, then sends it. So bytes that change after
the checksum void the chunk, and a chunk counts once its checksum is right. If a connection breaks,
a new one asks for the missing chunks; a silent owner is given up. When `pull` returns, the
connection is idle or closed: nothing more can arrive.

A reader proves by a grant that the blocks are leased to it (runtime/transfer/grants). Depends on
the blocks and versions of leases, not on requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import xxhash

from hadal.core.handshake import key_of
from hadal.core.messages.units import KvLease
from hadal.runtime.transfer.grants import Grant, Grants
from hadal.runtime.transfer.peers import NIXL_START_S, TRIES, BadPeer, Channel, PeerLink, PeerServer
from hadal.runtime.transfer.pool import FREED_DURING, KvPool, PoolAddress, PoolError, Shape
from hadal.runtime.transfer.transport import TCP

log = logging.getLogger(__name__)

PURPOSE = "kv 3"
"""Purpose of the key (core/handshake.key_of)."""
CHUNK_BYTES = 1 << 20
"""Maximum number of bytes of a chunk; one block at least. A chunk has one checksum and is resent by itself."""


class AboutPool(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Description of a pool by its owner's server."""

    name: str
    birth: str
    shape: Shape
    dtype: str
    has_nixl: bool


class PullChunks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request for these chunks of the leased blocks."""

    block_ids: tuple[int, ...]
    versions: tuple[int, ...]
    chunks: tuple[int, ...]
    grant: Grant
    """Proof that the lease belongs to this reader (runtime/transfer/grants)."""


class ChunkHead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Header of a chunk; the chunk's bytes follow."""

    chunk: int
    num_bytes: int
    digest: int
    """XXH3 of the bytes."""


class ChunksEnd(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End of an answer: all chunks were sent, a block was freed, or the lease was refused."""

    outcome: Literal["sent", "freed", "refused"]


class AskNixl(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request for the data that a reader with NIXL needs."""


class AboutNixl(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The owner's NIXL agent and the addresses of its pool; `error`: why there is no agent."""

    agent: bytes = b""
    cache: int = 0
    versions: int = 0
    error: str = ""


_GREETING = msgspec.msgpack.Decoder(AboutPool)
_ASKS: msgspec.msgpack.Decoder[PullChunks | AskNixl] = msgspec.msgpack.Decoder(PullChunks | AskNixl)
_CHUNKS: msgspec.msgpack.Decoder[ChunkHead | ChunksEnd] = msgspec.msgpack.Decoder(
    ChunkHead | ChunksEnd
)
_NIXL = msgspec.msgpack.Decoder(AboutNixl)


def blocks_per_chunk(block_bytes: int) -> int:
    return max(1, CHUNK_BYTES // block_bytes)


def checksum(views: Sequence[memoryview]) -> int:
    """Return the XXH3 of the bytes in order."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


class KvServer:
    """Server of one pool, until closed. `address`: the pool's address in leases."""

    def __init__(
        self,
        pool: KvPool,
        host: str,
        secret: bytes,
        grants: Grants,
        *,
        lease_s: float,
        about_nixl: Callable[[KvPool], AboutNixl] | None = None,
    ) -> None:
        """`lease_s`: longest time of an answer. `about_nixl` describes the pool to readers with
        NIXL; None if NIXL is not installed or not wanted.
        """
        self._pool = pool
        self._grants = grants
        self._lease_s = lease_s
        self._about_nixl = about_nixl
        self.peers = PeerServer(
            host,
            key_of(secret, PURPOSE),
            "kv",
            f"the KV pool {pool.name}",
            _ASKS,
            self._answer,
            greet=self._greet,
        )
        self.address = str(PoolAddress(pool.name, pool.birth, host, self.peers.port))
        self.close = self.peers.close
        self.peers.start()

    def _greet(self, channel: Channel) -> None:
        pool = self._pool
        channel.send_frame(
            AboutPool(pool.name, pool.birth, pool.shape, pool.dtype, self._about_nixl is not None)
        )

    def _answer(self, channel: Channel, ask: PullChunks | AskNixl) -> None:
        if isinstance(ask, PullChunks):
            self._send(channel, ask, time.monotonic() + self._lease_s)
        elif self._about_nixl is not None:
            channel.send_frame(self._about_nixl(self._pool))
        else:
            raise BadPeer("it asks for NIXL, which this process does not use")

    def _send(self, channel: Channel, ask: PullChunks, deadline_s: float) -> None:
        pool, per_chunk = self._pool, blocks_per_chunk(self._pool.block_bytes)
        ids, versions = ask.block_ids, ask.versions
        num_chunks = -(-len(ids) // per_chunk)
        is_sound = len(ids) == len(versions) and all(0 <= i < pool.num_blocks for i in ids)
        is_granted = self._grants.allows(ask.grant, channel.name, self.address, ids, versions)
        if not is_granted:
            self.peers.refusals.count(f"{channel.name} asks for blocks that are not leased to it")
        if (
            not is_granted
            or not is_sound
            or not all(0 <= chunk < num_chunks for chunk in ask.chunks)
        ):
            channel.send_frame(ChunksEnd("refused"), deadline_s=deadline_s)
            return
        for chunk in ask.chunks:
            part = slice(chunk * per_chunk, (chunk + 1) * per_chunk)
            views = pool.views(ids[part])
            digest = checksum(views)
            if not pool.holds(ids[part], versions[part]):
                channel.send_frame(ChunksEnd("freed"), deadline_s=deadline_s)
                return
            head = ChunkHead(chunk, sum(view.nbytes for view in views), digest)
            channel.send_frame(head, *views, deadline_s=deadline_s)
        is_held = pool.holds(ids, versions)
        channel.send_frame(ChunksEnd("sent" if is_held else "freed"), deadline_s=deadline_s)


class TcpTransfer:
    """A transfer out of a pool that a KvServer serves; it can also ask that server about NIXL. One
    thread at a time may use it.
    """

    name = TCP
    is_usable = True

    def __init__(self, address: PoolAddress, key: bytes, grants: Grants) -> None:
        self.peer = PeerLink(address.host, address.port, key, grants.name, self._greeted)
        self._address = address
        self._grants = grants
        self._about: AboutPool | None = None

    def about(self, deadline_s: float) -> AboutPool:
        """Return the pool's description; may connect first. Raises OSError, BadPeer, PoolError."""
        return self.peer.ask(lambda channel: self._found(), deadline_s)

    def ask_nixl(self, deadline_s: float) -> AboutNixl:
        """Return the data that NIXL needs to read the pool. Raises OSError, BadPeer, PoolError."""

        def ask(channel: Channel) -> AboutNixl:
            channel.send_frame(AskNixl())
            return channel.receive_frame(_NIXL, deadline_s, NIXL_START_S)

        return self.peer.ask(ask, deadline_s)

    def open(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        """Do nothing: `pull` connects, and checks that the blocks fit."""
        return None

    def pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        """Copy and verify leased blocks. Return None, or why the copy is void. Raises OSError,
        BadPeer, PoolError.
        """
        missing = set(range(-(-len(into) // blocks_per_chunk(own.block_bytes))))
        tries = iter(range(TRIES))

        def pull(channel: Channel) -> str | None:
            about = self._found()
            wrong = own.mismatch(about.name, about.shape, about.dtype, lease, into)
            if wrong is not None:
                return wrong
            for _ in tries:  # Tries over an earlier connection count as well.
                channel.send_frame(
                    PullChunks(
                        lease.block_ids,
                        lease.versions,
                        tuple(sorted(missing)),
                        self._grants.of(lease),
                    )
                )
                if self._receive(channel, own, into, missing, deadline_s):
                    return FREED_DURING
                if not missing:
                    return None
            return f"{len(missing)} chunks from {about.name} do not match their checksums"

        return self.peer.ask(pull, deadline_s)

    def close(self) -> None:
        self.peer.close()

    def _greeted(self, channel: Channel, deadline_s: float) -> None:
        """Read the greeting. Raises PoolError if another pool has the address by now."""
        about, address = channel.receive_frame(_GREETING, deadline_s), self._address
        if (about.name, about.birth) != (address.name, address.birth):
            raise PoolError(f"KV pool {address.name} is gone; {about.name} is served in its place")
        self._about = about

    def _found(self) -> AboutPool:
        assert self._about is not None
        return self._about

    def _receive(
        self,
        channel: Channel,
        own: KvPool,
        into: tuple[int, ...],
        missing: set[int],
        deadline_s: float,
    ) -> bool:
        """Receive chunks, and remove the sound ones from `missing`. True if blocks were freed."""
        per_chunk, asked = blocks_per_chunk(own.block_bytes), set(missing)
        while True:
            head = channel.receive_frame(_CHUNKS, deadline_s)
            if isinstance(head, ChunksEnd):
                if head.outcome == "refused":
                    raise BadPeer("it rejects the lease")
                if head.outcome == "sent" and asked:
                    raise BadPeer(f"it ends with {len(asked)} chunks missing")
                return head.outcome == "freed"
            part = into[head.chunk * per_chunk : (head.chunk + 1) * per_chunk]
            if head.chunk not in asked or head.num_bytes != len(part) * own.block_bytes:
                raise BadPeer(
                    f"it sends {head.num_bytes} bytes as chunk {head.chunk}, not as requested"
                )
            asked.discard(head.chunk)
            views = own.views(part)
            channel.fill(*views, deadline_s=deadline_s)
            if checksum(views) == head.digest:
                missing.discard(head.chunk)
            else:
                log.warning(
                    "chunk %d from %s does not match its checksum",
                    head.chunk,
                    self._address.name,
                )

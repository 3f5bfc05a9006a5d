"""Grants: proofs that a lease belongs to a certain reader. A grant travels with the message that
gives the lease to that reader.

The sender of the lease belongs to the deployment and has decided that this reader shall copy these
blocks. Its grant is an HMAC over the pool, the reader, the blocks and their versions, which only a
holder of the secret can make. The pool's server sends only granted blocks, so a reader gets no
others by naming them. A block that was freed since has another version, so an old grant does not
cover the data that a later tenant writes into it.

Roles are independent of grants: the wire adds a grant to an outgoing message and keeps that of an
incoming one, and the transport looks it up by the lease. Decisions can be replayed without a
secret.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict

import msgspec

from hadal.core.handshake import key_of, mac
from hadal.core.messages.base import FRONT
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.pools import Pull
from hadal.core.messages.ranks import RankDo
from hadal.core.messages.units import Decode, Filled, KvLease

MAX_KEPT = 8192
"""Maximum number of grants kept for leases that may still be pulled: more than a rank has requests."""
MAX_KEPT_BLOCKS = 1 << 20
"""Maximum number of blocks of all kept leases together: more than a pool has. They take 75 MB;
without this limit, MAX_KEPT leases on long prompts would take 1.3 GB.
"""
PURPOSE = "lease 1"


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The leased blocks with their versions, and the HMAC that proves the lease."""

    block_ids: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    tag: bytes = b""


class Grants:
    """Grants of one process: makes, keeps and checks them. `name`: the process's name on the wire.
    From any thread.
    """

    def __init__(self, secret: bytes, name: str) -> None:
        self.name = name
        self._key = key_of(secret, PURPOSE)
        self._kept: OrderedDict[KvLease, bytes] = OrderedDict()
        self._num_blocks = 0
        """Blocks of all leases in `_kept`."""

    def to(self, reader: str, message: AnyMessage) -> bytes:
        """Return the tag for a message to `reader`; empty if the message gives it no lease. The
        front gets no tag: it passes leases on and copies nothing.
        """
        lease = None if reader == FRONT else _lease_of(message)
        return b"" if lease is None else self.grant(reader, lease).tag

    def grant(self, reader: str, lease: KvLease) -> Grant:
        """Return the grant that lets `reader` copy the blocks of `lease`."""
        tag = self._tag(reader, lease.source, lease.block_ids, lease.versions)
        return Grant(lease.block_ids, lease.versions, tag)

    def keep(self, message: AnyMessage, tag: bytes) -> None:
        """Keep the tag that arrived with a message, by its lease. Drop the oldest beyond limits."""
        lease = _lease_of(message)
        if lease is None or not tag:
            return
        if lease not in self._kept:
            self._num_blocks += len(lease.block_ids)
        self._kept[lease] = tag
        self._kept.move_to_end(lease)
        while len(self._kept) > MAX_KEPT or (
            self._num_blocks > MAX_KEPT_BLOCKS and len(self._kept) > 1
        ):
            oldest, _ = self._kept.popitem(last=False)
            self._num_blocks -= len(oldest.block_ids)

    def of(self, lease: KvLease) -> Grant:
        """Return the grant under which this process may copy the blocks of `lease`: that of the
        lease itself, or of a larger lease with these blocks, for example if prefill already has the
        first ones. Empty if there is none.
        """
        tag = self._kept.get(lease)
        if tag is not None:
            return Grant(lease.block_ids, lease.versions, tag)
        wanted = _pairs(lease)
        for kept, kept_tag in reversed(list(self._kept.items())):
            # Test one block first: making a set of every kept lease would take half a second.
            has_last = all(block_id in kept.block_ids for block_id in lease.block_ids[-1:])
            if kept.source == lease.source and has_last and wanted <= _pairs(kept):
                return Grant(kept.block_ids, kept.versions, kept_tag)
        return Grant()

    def allows(
        self,
        grant: Grant,
        reader: str,
        source: str,
        block_ids: tuple[int, ...],
        versions: tuple[int, ...],
    ) -> bool:
        """Return True if the grant lets `reader` copy these blocks of the pool at `source`."""
        is_whole = (block_ids, versions) == (
            grant.block_ids,
            grant.versions,
        )  # The usual case.
        granted = () if is_whole else zip(grant.block_ids, grant.versions, strict=False)
        is_part = is_whole or set(granted).issuperset(zip(block_ids, versions, strict=False))
        return is_part and hmac.compare_digest(
            grant.tag, self._tag(reader, source, grant.block_ids, grant.versions)
        )

    def _tag(
        self, reader: str, source: str, block_ids: tuple[int, ...], versions: tuple[int, ...]
    ) -> bytes:
        numbers = msgspec.msgpack.encode((block_ids, versions))
        return mac(self._key, source.encode(), reader.encode(), numbers)


def _pairs(lease: KvLease) -> set[tuple[int, int]]:
    return set(zip(lease.block_ids, lease.versions, strict=False))


def _lease_of(message: AnyMessage) -> KvLease | None:
    match message:
        case Decode(lease=lease) | Filled(lease=lease) | RankDo(Pull(lease=lease)):
            return lease
    return None

"""A grant proves that a lease is a certain reader's. It travels beside the message that hands the
lease to that reader.

Whoever hands on a lease is of the deployment, decided that this reader shall copy these blocks, and
says so in a form that only a holder of the secret can make: an HMAC over the pool, the reader, the
blocks and the versions they had. The pool's server serves nothing else. So a reader gets what it
was given, and nothing by naming other blocks; and a block that was freed since has another
version, so that what a later tenant writes into it is not under an old grant.

Roles know nothing of it: the wire adds a grant on the way out and keeps it on the way in, and the
transport looks it up by the lease. Decisions can be replayed without a secret.
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
"""Grants held for leases that may still be pulled: more than a rank has requests."""
MAX_KEPT_BLOCKS = 1 << 20
"""Blocks of all kept leases together, more than a pool has: 75 MB. So many leases on long prompts
would be 1.3 GB.
"""
PURPOSE = "lease 1"


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that were leased, and the HMAC that says so."""

    block_ids: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    tag: bytes = b""


class Grants:
    """Makes, keeps and checks the grants of one process, called `name` on the wire. From any
    thread.
    """

    def __init__(self, secret: bytes, name: str) -> None:
        self.name = name
        self._key = key_of(secret, PURPOSE)
        self._kept: OrderedDict[KvLease, bytes] = OrderedDict()
        self._num_blocks = 0
        """Blocks of all leases in `_kept`."""

    def to(self, reader: str, message: AnyMessage) -> bytes:
        """The tag that goes with a message to `reader`; empty where the message hands it no
        lease. The front hands leases on and copies nothing.
        """
        lease = None if reader == FRONT else _lease_of(message)
        return b"" if lease is None else self.grant(reader, lease).tag

    def grant(self, reader: str, lease: KvLease) -> Grant:
        """What lets `reader` copy the blocks of `lease`."""
        tag = self._tag(reader, lease.source, lease.block_ids, lease.versions)
        return Grant(lease.block_ids, lease.versions, tag)

    def keep(self, message: AnyMessage, tag: bytes) -> None:
        """Remember what came with a message."""
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
        """The grant under which this process may copy the blocks of `lease`: it was handed that
        lease, or one that these blocks are a part of, as when prefill has the first of them itself.
        Empty if it was not.
        """
        tag = self._kept.get(lease)
        if tag is not None:
            return Grant(lease.block_ids, lease.versions, tag)
        wanted = _pairs(lease)
        for kept, kept_tag in reversed(list(self._kept.items())):
            # One block first: to make a set of each that is kept would take half a second.
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
        """Whether `reader` may copy these blocks of the pool at `source`."""
        is_whole = (block_ids, versions) == (
            grant.block_ids,
            grant.versions,
        )  # As nearly always.
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

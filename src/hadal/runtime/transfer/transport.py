"""The Protocol of a transport that brings leased blocks out of one pool of another process.

A new transport is a file beside this one, its name here, its end and its place in
runtime/transfer/kv, and, where both ends have to agree first, a question in runtime/transfer/tcp;
core/config and runtime/resolve let a deployment ask for it. Independent of any single transport.
"""

from __future__ import annotations

from typing import Protocol

from hadal.core.errors import HadalError
from hadal.core.messages.units import KvLease
from hadal.runtime.transfer.peers import PeerLink
from hadal.runtime.transfer.pool import KvPool

SHM, NIXL, TCP = "shm", "nixl", "tcp"
"""Names of the transports, as a deployment's `handover` has them."""


class CannotPull(HadalError):
    """The two ends cannot use this transport; they may be able to use another."""


class KvTransfer(Protocol):
    """One transport from a pool of another process to a pool of this one. One thread at a time may
    use it, unless it has no `peer`.
    """

    @property
    def name(self) -> str: ...

    @property
    def peer(self) -> PeerLink | None:
        """Connection that its pulls wait for; None: they copy memory, and wait for no process."""
        ...

    @property
    def is_usable(self) -> bool:
        """False once the source is gone, or this end has no means left to pull."""
        ...

    def open(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        """Prepare the pull of leased blocks. Return None, or why they cannot be copied. Raises
        OSError, BadPeer, PoolError, CannotPull.
        """
        ...

    def pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        """Copy leased blocks into own blocks and verify them, after `open`. Return None, or why the
        copy is void. Raises what `open` raises.
        """
        ...

    def close(self) -> None:
        """Release what pulls use. The next `open` acquires it again if there is a `peer`."""
        ...

"""KV transfer (effect Pull of core/seams): pulls of leased blocks out of another process's KV pool,
over a transport that both ends support.

    shm   the shared-memory file is on this host: mapped once, copied from   (runtime/transfer/shared_memory)
    nixl  both ends have NIXL: one-sided reads over UCX                      (runtime/transfer/nixl)
    tcp   anything else: the owner's server sends                            (runtime/transfer/tcp)

Each transport is a KvTransfer (runtime/transfer/transport), and `transfers_to` chooses.

The reader always copies into its own blocks. After `pull` has returned, nothing more is written to
them: no late write can land in a block that another request uses by then. With every transport, a
freed block voids the pull, by the versions in the owner's pool. A source that timed out once is not
asked for SHUN_S, so that other pulls from it fail immediately.

Independent of requests.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from hadal.core.balance import AUTO
from hadal.core.handshake import is_near, key_of
from hadal.core.messages.units import KvLease
from hadal.runtime.process.process import Run
from hadal.runtime.transfer.grants import Grants
from hadal.runtime.transfer.nixl import NixlAgent, NixlTransfer, package, require_nixl
from hadal.runtime.transfer.peers import SILENCE_S, BadPeer
from hadal.runtime.transfer.pool import KvPool, PoolAddress, PoolError
from hadal.runtime.transfer.shared_memory import SharedMemoryTransfer, map_pool
from hadal.runtime.transfer.tcp import PURPOSE, KvServer, TcpTransfer
from hadal.runtime.transfer.transport import NIXL, SHM, CannotPull, KvTransfer

log = logging.getLogger(__name__)

_LOOK_S = 1.0


@dataclass(frozen=True)
class OwnEnd:
    """Own end of every transfer: the transports it may use, and their key, grants and agent."""

    handover: str
    key: bytes
    """Key of the handshake on TCP connections."""
    grants: Grants | None
    """Grants of this process; None: it has no secret, so it can ask no other process for blocks."""
    nixl: NixlAgent | None
    """NIXL agent of this process; None: NIXL is not installed or not wanted."""


class KvWire:
    """Transfers of this process's pool: pulls into it from other pools, and a server for others'
    pulls. `pull` may be called from any thread.
    """

    def __init__(
        self,
        pool: KvPool,
        handover: str = SHM,
        *,
        host: str = "127.0.0.1",
        secret: bytes = b"",
        grants: Grants | None = None,
        lease_s: float = 30.0,
    ) -> None:
        """`host`: address that the server listens on and that other hosts use. `lease_s`: longest
        time of a pull. `secret` and `grants`: needed for all transports but shared memory, which
        the system itself protects from other users.

        Raises ConfigError if `handover` is "nixl" and NIXL is not installed.
        """
        if handover == NIXL:
            require_nixl()
        self._pool = pool
        self._host = host
        self._lease_s = lease_s
        has_nixl = handover in (NIXL, AUTO) and package() is not None
        nixl = NixlAgent(f"{pool.name}#{pool.birth}") if has_nixl else None
        key = key_of(secret, PURPOSE) if grants is not None else b""
        self._own = OwnEnd(handover, key, grants, nixl)
        self._server = None
        self.address = pool.name
        """Address of the pool, as leases name it."""
        if nixl is not None and handover == NIXL:
            nixl.about(pool)  # Make it now, not in the middle of the first pull.
        if handover != SHM:
            if grants is None:
                raise ValueError(f"handover is {handover}, which needs a secret and grants.")
            about_nixl = None if nixl is None else nixl.about
            self._server = KvServer(
                pool, host, secret, grants, lease_s=lease_s, about_nixl=about_nixl
            )
            self.address = self._server.address
        self._lock = threading.Lock()
        self._sources: dict[str, _SourcePool] = {}
        """Unit -> its source. A restarted unit's pool has another name and replaces the old one."""
        self._looked_s = time.monotonic()

    def pull(self, lease: KvLease, into: tuple[int, ...]) -> str | None:
        """Copy and verify leased blocks. Return None, or what went wrong."""
        try:
            return self._source(lease.source).pull(
                self._pool, lease, into, time.monotonic() + self._lease_s
            )
        except PoolError as error:
            return str(error)

    def is_near(self, source: str) -> bool:
        """Return True if pulls from `source` are copies in memory, which wait for no process. Takes
        no longer than opening a file.
        """
        try:
            return self._source(source).is_near
        except PoolError:
            return True  # Pulls fail immediately.

    def is_on_node(self, source: str) -> bool:
        """Return True if the pool is on this node, over any transport."""
        try:
            known = self._source(source)
        except PoolError:
            return True  # No bytes come from there.
        return known.is_near or known.address.host == self._host

    def transport_of(self, source: str) -> str:
        """Return the transport of pulls from `source`; "" before the first pull over a network."""
        return self._source(source).transport

    def unmap_ended(self) -> None:
        """Unmap the pools of ended units: a mapped pool occupies memory that later units need.
        Looks once per second at most.
        """
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        with self._lock:
            gone = {unit: one for unit, one in self._sources.items() if one.is_gone}
            for unit in gone:
                del self._sources[unit]
        for source in gone.values():
            source.close()

    def close(self, timeout_s: float = SILENCE_S) -> None:
        with self._lock:
            sources = list(self._sources.values())
            self._sources.clear()
        for source in sources:
            source.close()
        if self._server is not None and not self._server.close(timeout_s):
            log.warning("this process ends while it sends KV")

    def _source(self, text: str) -> _SourcePool:
        address = PoolAddress.parse(text)
        with self._lock:
            known = self._sources.get(address.unit)
            if known is not None and known.address == address:
                return known
            source = _SourcePool(address, self._own)
            self._sources[address.unit] = source
        if known is not None:
            known.close()
        return source


class _SourcePool:
    """One pool of another process, and the transports to it."""

    def __init__(self, address: PoolAddress, own: OwnEnd) -> None:
        """Raises PoolError if no transport can reach the pool."""
        self.address = address
        self.transport = ""
        self.transfers = transfers_to(address, own)
        """Transfers over transports that have not failed, best first; TCP, the last, is kept."""
        self._may_fall_back = own.handover == AUTO
        self._peer = self.transfers[0].peer
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Held during a pull over a network."""
        if self.is_near:
            self._note_transport(self.transfers[0])

    @property
    def is_near(self) -> bool:
        """True if pulls are copies in memory."""
        return self._peer is None

    def pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        if self._peer is None:
            return self.transfers[0].pull(own, lease, into, deadline_s)
        if not into and not lease.block_ids:
            return None
        with self._lock:
            if self._peer.is_shunned:
                return f"{self.address.name} did not answer a moment ago"
            try:
                return self._pull(own, lease, into, deadline_s)
            except TimeoutError as error:
                self._peer.shun()
                self._let_go()
                return f"{self.address.name} is silent: {error}"
            except (OSError, BadPeer, PoolError, CannotPull) as error:
                self._let_go()
                return f"{self.address.name}: {str(error) or type(error).__name__}"
            finally:
                if self._closing.is_set():
                    self._let_go()

    @property
    def is_gone(self) -> bool:
        """True if the pool is mapped here and its file was removed."""
        return not any(transfer.is_usable for transfer in self.transfers)

    def close(self) -> None:
        """Close the transfers. A pull under way fails soon, and then closes them itself."""
        self._closing.set()
        if self._peer is not None:
            self._peer.interrupt()
        if self._lock.acquire(blocking=False):
            self._let_go()
            self._lock.release()

    def _pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        while True:
            transfer = next(one for one in self.transfers if one.is_usable)
            try:
                wrong = transfer.open(own, lease, into, deadline_s)
                if wrong is not None:
                    return wrong
                self._note_transport(transfer)
                return transfer.pull(own, lease, into, deadline_s)
            except CannotPull as error:
                transfer.close()
                if not self._may_fall_back:
                    raise
                # If the pool's owner is gone, the next transport fails immediately too.
                self.transfers = tuple(one for one in self.transfers if one is not transfer)
                log.warning(
                    "pulls from %s use %s from now on: %s",
                    self.address.name,
                    self.transfers[0].name.upper(),
                    error,
                )

    def _note_transport(self, transfer: KvTransfer) -> None:
        if transfer.name != self.transport:
            log.info("KV of %s is pulled over %s", self.address.unit, transfer.name)
        self.transport = transfer.name

    def _let_go(self) -> None:
        for transfer in self.transfers:
            transfer.close()


def transfers_to(address: PoolAddress, own: OwnEnd) -> tuple[KvTransfer, ...]:
    """Choose the transports to a pool by the abilities of this end, best first. Each asks for the
    other end's abilities when it is opened. Raises PoolError if there is none.
    """
    if own.handover in (SHM, AUTO):
        mapped = map_pool(address, is_asked=own.handover == SHM)
        if mapped is not None:
            return (SharedMemoryTransfer(mapped),)
    if own.grants is None:
        raise PoolError(
            f"{address.name} is not on this host, and this process has no secret to ask for it"
        )
    tcp = TcpTransfer(address, own.key, own.grants)
    return (tcp,) if own.nixl is None else (NixlTransfer(own.nixl, tcp), tcp)


def open_kv_wire(pool: KvPool, run: Run, grants: Grants) -> KvWire:
    """Make the KvWire of a run's process, for pulls in both directions. Raises ConfigError."""
    deployment = run.deployment
    handover = deployment.handover
    if handover == AUTO and is_near(run.address):
        handover = SHM  # All pullers are on this host, so no server is needed.
    return KvWire(
        pool,
        handover,
        host=run.address,
        secret=run.secret,
        grants=grants,
        lease_s=deployment.lease_s,
    )

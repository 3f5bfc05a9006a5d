"""The Wire seam's bytes, live: the pull of leased blocks out of another process's KV pool, by
whichever transport both ends can do.

    shm   the shared-memory file is on this host: mapped once, copied from   (runtime/transfer/pool)
    nixl  both ends have NIXL: one-sided reads over UCX                      (runtime/transfer/nixl)
    tcp   anything else: the owner's server sends                            (runtime/transfer/tcp)

Always the reader copies, into blocks of its own, and when `pull` returns nothing more is written to
them: no late write can land in somebody else's block. Freed blocks void a pull whatever the
transport, by the versions the owner holds. A source that was silent once is not asked for
SHUN_S, so that what else is due from it fails at once.

Knows nothing of requests.
"""

from __future__ import annotations

import logging
import threading
import time

from hadal.core.balance import AUTO
from hadal.core.handshake import is_near, key_of
from hadal.core.messages.units import KvLease
from hadal.runtime.process.process import Run
from hadal.runtime.transfer.grants import Grants
from hadal.runtime.transfer.nixl import NixlAgent, NixlError, NixlReader, package, require_nixl
from hadal.runtime.transfer.peers import SILENCE_S, BadPeer
from hadal.runtime.transfer.pool import KvPool, PoolAddress, PoolError
from hadal.runtime.transfer.tcp import PURPOSE, KvLink, KvServer

log = logging.getLogger(__name__)

SHM, NIXL, TCP = "shm", "nixl", "tcp"
_LOOK_S = 1.0


class KvTransfer:
    """Pulls into this process's pool from any other, and serves it to others. `pull` may be called
    from any thread.
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
        """`host` is what the server listens on, and where others find it. `lease_s`: no pull takes
        longer. `secret` and `grants` are needed for anything but shared memory, which the system
        itself keeps from other users.

        Raises ConfigError if `handover` is "nixl" and it is not installed.
        """
        if handover == NIXL:
            require_nixl()
        self._pool = pool
        self._host = host
        self._handover = handover
        self._key = key_of(secret, PURPOSE) if grants is not None else b""
        self._grants = grants
        self._lease_s = lease_s
        has_nixl = handover in (NIXL, AUTO) and package() is not None
        self._nixl = NixlAgent(f"{pool.name}#{pool.birth}") if has_nixl else None
        self._server = None
        self.address = pool.name
        """Address of the pool, as leases name it."""
        if self._nixl is not None and handover == NIXL:
            self._nixl.about(pool)  # It will be asked for; better now than in the middle of a pull.
        if handover != SHM:
            if grants is None:
                raise ValueError(
                    f"{handover}: KV leaves the process only with a secret and grants."
                )
            self._server = KvServer(pool, host, secret, grants, lease_s=lease_s, nixl=self._nixl)
            self.address = self._server.address
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        """Unit -> its source: a restarted unit's pool has another name and takes its predecessor's
        place.
        """
        self._looked_s = time.monotonic()

    def pull(self, lease: KvLease, into: tuple[int, ...]) -> str | None:
        """Copy and verify leased blocks. Returns None, or what went wrong."""
        try:
            return self._source(lease.source).pull(
                self._pool, lease, into, time.monotonic() + self._lease_s
            )
        except PoolError as error:
            return str(error)

    def is_near(self, source: str) -> bool:
        """Whether pulls from there wait for nobody: they are copies in memory. Takes no longer than
        opening a file.
        """
        try:
            return self._source(source).mapped is not None
        except PoolError:
            return True  # And fail at once.

    def is_on_node(self, source: str) -> bool:
        """Whether the pool is on this node, whichever way its KV comes."""
        try:
            known = self._source(source)
        except PoolError:
            return True  # Nothing comes from there.
        return known.mapped is not None or known.address.host == self._host

    def transport_of(self, source: str) -> str:
        """Which transport the pulls from there take, as far as is known; "" before the first over a
        network.
        """
        return self._source(source).transport

    def let_go(self) -> None:
        """Unmap pools whose units are gone: else they hold the memory that the next ones need. Looks
        once a second at most.
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
            log.warning("leaving in the middle of sending KV")

    def _source(self, text: str) -> _Source:
        address = PoolAddress.parse(text)
        with self._lock:
            known = self._sources.get(address.unit)
            if known is not None and known.address == address:
                return known
            source = _Source(address, self._handover, self._key, self._grants, self._nixl)
            self._sources[address.unit] = source
        if known is not None:
            known.close()
        return source


class _Source:
    """One pool of another process, and the way to it."""

    def __init__(
        self,
        address: PoolAddress,
        handover: str,
        key: bytes,
        grants: Grants | None,
        nixl: NixlAgent | None,
    ) -> None:
        """Raises PoolError if only shared memory may be used and it is not there."""
        self.address = address
        self.mapped: KvPool | None = None
        self.transport = ""
        self._is_nixl_asked = handover == NIXL
        self._nixl = nixl if handover in (NIXL, AUTO) else None
        self._reader: NixlReader | None = None
        self._link: KvLink | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Held while something is pulled over a network."""
        if handover in (SHM, AUTO):
            self.mapped = _map_pool(address, is_asked=handover == SHM)
        if self.mapped is not None:
            self._note_transport(SHM)
        elif grants is None:
            raise PoolError(
                f"{address.name} is not on this host, and this process has no secret to ask for it"
            )
        else:
            self._link = KvLink(address, key, grants)

    def pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        if self.mapped is not None:
            return own.copy_from(self.mapped, lease, into)
        if not into and not lease.block_ids:
            return None
        assert self._link is not None
        with self._lock:
            if self._link.peer.is_shunned:
                return f"{self.address.name} did not answer a moment ago"
            try:
                return self._pull(self._link, own, lease, into, deadline_s)
            except TimeoutError as error:
                self._link.peer.shun()
                self._let_go()
                return f"{self.address.name} is silent: {error}"
            except (OSError, BadPeer, PoolError, NixlError) as error:
                self._let_go()
                return f"{self.address.name}: {str(error) or type(error).__name__}"
            finally:
                if self._closing.is_set():
                    self._let_go()

    @property
    def is_gone(self) -> bool:
        """Its pool is mapped here and removed there."""
        return self.mapped is not None and self.mapped.is_gone

    def close(self) -> None:
        """Let nothing be pulled from it any more. A pull under way fails soon, and lets go by
        itself.
        """
        self._closing.set()
        if self.mapped is not None:
            self.mapped.close()
        if self._link is not None:
            self._link.peer.interrupt()
        if self._lock.acquire(blocking=False):
            self._let_go()
            self._lock.release()

    def _pull(
        self,
        link: KvLink,
        own: KvPool,
        lease: KvLease,
        into: tuple[int, ...],
        deadline_s: float,
    ) -> str | None:
        if self._nixl is not None and not self._nixl.is_full:
            try:
                return self._pull_nixl(self._nixl, link, own, lease, into, deadline_s)
            except NixlError as error:
                self._close_reader()
                if self._is_nixl_asked:
                    raise
                # If its owner is gone, TCP fails at once too.
                log.warning("%s is pulled from over TCP from now on: %s", self.address.name, error)
                self._nixl = None
        self._note_transport(TCP)
        return link.pull(own, lease, into, deadline_s)

    def _pull_nixl(
        self,
        nixl: NixlAgent,
        link: KvLink,
        own: KvPool,
        lease: KvLease,
        into: tuple[int, ...],
        deadline_s: float,
    ) -> str | None:
        about = link.about(deadline_s)
        wrong = own.mismatch(about.name, about.shape, about.dtype, lease, into)
        if wrong is not None:
            return wrong
        if self._reader is None:
            if not about.has_nixl:
                raise NixlError("its owner has no NIXL")
            answer = link.ask_nixl(deadline_s)
            if answer.error:
                raise NixlError(f"its owner's NIXL: {answer.error}")
            self._reader = nixl.reader(answer, own.block_bytes, about.shape[0])
        self._note_transport(NIXL)
        return self._reader.pull(own, lease, into, deadline_s)

    def _note_transport(self, transport: str) -> None:
        if transport != self.transport:
            log.info("KV of %s comes over %s", self.address.unit, transport)
        self.transport = transport

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _let_go(self) -> None:
        self._close_reader()
        if self._link is not None:
            self._link.peer.close()


def live_transfer(pool: KvPool, run: Run, grants: Grants) -> KvTransfer:
    """Make what a process of a run pulls with, and others pull from. Raises ConfigError."""
    deployment = run.deployment
    handover = deployment.handover
    if handover == AUTO and is_near(run.address):
        handover = SHM  # Whoever pulls is on this host: nothing listens that nobody needs.
    return KvTransfer(
        pool,
        handover,
        host=run.address,
        secret=run.secret,
        grants=grants,
        lease_s=deployment.lease_s,
    )


def _map_pool(address: PoolAddress, *, is_asked: bool) -> KvPool | None:
    """The shared-memory file, if it is on this host. Raises PoolError if it is not and nothing else
    will do.
    """
    try:
        mapped = KvPool.open(address.name)
    except PoolError:
        if is_asked or not address.port:
            raise
        return None
    if address.birth and mapped.birth != address.birth:
        mapped.close()
        if is_asked:
            raise PoolError(f"{address.name} on this host is another pool of that name")
        return None
    return mapped

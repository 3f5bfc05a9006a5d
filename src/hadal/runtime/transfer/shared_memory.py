"""KV over shared memory: the source's file, on this host, is mapped once.

Independent of other hosts.
"""

from __future__ import annotations

from hadal.core.messages.units import KvLease
from hadal.runtime.transfer.pool import KvPool, PoolAddress, PoolError
from hadal.runtime.transfer.transport import SHM


class SharedMemoryTransfer:
    """A transfer out of a mapped pool. Any thread may pull."""

    name = SHM
    peer = None

    def __init__(self, mapped: KvPool) -> None:
        self.mapped = mapped

    @property
    def is_usable(self) -> bool:
        return not self.mapped.is_gone

    def open(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        return None

    def pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        return own.copy_from(self.mapped, lease, into)

    def close(self) -> None:
        self.mapped.close()


def map_pool(address: PoolAddress, *, is_asked: bool) -> KvPool | None:
    """Map the pool's file; None if it is not on this host. `is_asked`: no other transport may be
    used. Raises PoolError if the file is not here and no other transport can be used.
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

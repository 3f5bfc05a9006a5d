"""Disk cache of a simulated world: its blocks, and the time to read and write them.

    leader: find (View) -> ReadBlocks --> queue of the rank's node --> BlocksRead
                           StoreBlocks -> queue of the rank's node --> BlocksStored, then found

The content is one number per request: its leading blocks on disk. A node's ranks share its storage
NIC: reads queue behind reads and writes behind writes, because a link carries both directions at
once. No data is read or written; a block is only its name.

Does not depend on roles or on prices of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hadal.core.arrays import Ints
from hadal.core.cache import NAME_BYTES, DiskLocation, num_names, split
from hadal.core.messages.pools import ReadBlocks, StoreBlocks
from hadal.core.plans import BlocksRead, BlocksStored
from hadal.lab.sim.world.requests import block_of, chain_of

GIB = 2**30
_HERE = DiskLocation(0, 0)
"""Location of every block; it is never read."""


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of the storage network per node. Raises ValueError for an impossible value."""

    read_bytes_per_s: float = 40.0 * GIB
    """Peak read throughput of a KV cache client (3FS README), over a 400 Gb/s NIC that only storage
    uses (arXiv 2505.09343).
    """
    write_bytes_per_s: float = 40.0 * GIB
    """Assumed equal to the read speed: the NIC's other direction."""
    latency_s: float = 0.0
    """Fixed time of a read or write, in addition to its transfer; no value was published."""
    node_ranks: int = 8
    """Ranks that share a NIC."""

    def __post_init__(self) -> None:
        if (
            min(self.read_bytes_per_s, self.write_bytes_per_s) <= 0.0
            or self.latency_s < 0.0
            or self.node_ranks < 1
        ):
            raise ValueError(
                f"{self}: bytes/s and ranks per node must be above 0, the latency 0 or more."
            )


class View:
    """A leader's index of the blocks on disk (BlockIndex of kv/disk_index).

    `num_blocks`: blocks on disk per request, shared by all views. Blocks that a read did not find
    are dropped from this view only.
    """

    def __init__(self, num_blocks: Ints) -> None:
        self._num_blocks = num_blocks
        self._dropped: dict[int, int] = {}
        """Request -> index of its first dropped block."""

    def __len__(self) -> int:
        return 0  # Unused in a simulation.

    def __contains__(self, name: bytes) -> bool:
        return self.find(name) is not None

    def put(self, names: bytes, locations: Sequence[DiskLocation | None]) -> None:
        """Record blocks as on disk if all blocks before them are; gaps cannot be represented."""
        for name, location in zip(split(names), locations, strict=True):
            known = self._known(name)
            if location is None or known is None:
                continue
            number, index = known
            if self._dropped.get(number) == index:
                del self._dropped[number]
            if self._num_blocks[number] == index:
                self._num_blocks[number] = index + 1

    def drop(self, names: bytes) -> None:
        """Hide the named blocks, and later blocks of their requests, from this view."""
        for name in split(names):
            known = self._known(name)
            if known is not None:
                self._dropped[known[0]] = min(known[1], self._dropped.get(known[0], known[1]))

    def find(self, name: bytes) -> DiskLocation | None:
        """Return the location of a block; None if it is not on disk."""
        known = self._known(name)
        return _HERE if known is not None and known[1] < self._end_of(known[0]) else None

    def found(self, names: bytes) -> tuple[DiskLocation, ...]:
        """Return the locations of the named blocks that are on disk."""
        known = self._known(names[:NAME_BYTES]) if names else None
        end = num_names(names)
        # The usual case, without decoding each name: consecutive blocks of one request.
        if (
            known is not None
            and names == chain_of(known[0], known[1] + end)[known[1] * NAME_BYTES :]
        ):
            return (_HERE,) * min(end, max(0, self._end_of(known[0]) - known[1]))
        return tuple(location for name in split(names) if (location := self.find(name)) is not None)

    def num_found(self, chain: bytes) -> int:
        """Return the length in blocks of the chain's longest prefix on disk."""
        known = self._known(chain[:NAME_BYTES]) if chain else None
        return (
            0 if known is None else min(num_names(chain), max(0, self._end_of(known[0]) - known[1]))
        )

    def lookup(self, chain: bytes) -> tuple[DiskLocation, ...]:
        """Return the locations of the chain's longest prefix on disk."""
        return (_HERE,) * self.num_found(chain)

    def _known(self, name: bytes) -> tuple[int, int] | None:
        found = block_of(name)
        return found if found is not None and found[0] < len(self._num_blocks) else None

    def _end_of(self, number: int) -> int:
        """Return the number of the request's leading blocks that this view finds on disk."""
        num = int(self._num_blocks[number])
        return min(num, self._dropped.get(number, num)) if self._dropped else num


class NodeQueues:
    """Queues of the nodes' NICs in one direction: the time at which each becomes free."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s: dict[tuple[str, int], float] = {}

    def ask(self, now_s: float, node: tuple[str, int], num_bytes: float) -> tuple[float, float]:
        """Queue `num_bytes`; return begin and end of the transfer. The end includes the latency."""
        begin_s = max(now_s, self._free_s.get(node, 0.0))
        self._free_s[node] = begin_s + num_bytes / self._bytes_per_s
        return begin_s, self._free_s[node] + self._latency_s


class WorldDisk:
    """Disk reads and writes of all units. `block_bytes`: KV bytes of a block over all layers.

    `num_loaded`: (now, (unit, node index), blocks of a read) -> blocks that the read returns.
    """

    def __init__(
        self,
        num_blocks: Ints,
        block_bytes: float,
        speed: DiskSpeed,
        num_loaded: Callable[[float, tuple[str, int], int], int] = lambda now_s, node, num: num,
    ) -> None:
        self.num_blocks = num_blocks
        """Number of leading blocks of each request on disk."""
        self._block_bytes = block_bytes
        self._node_ranks = speed.node_ranks
        self._reads = NodeQueues(speed.read_bytes_per_s, speed.latency_s)
        self._writes = NodeQueues(speed.write_bytes_per_s, speed.latency_s)
        self._num_loaded = num_loaded

    def view(self) -> View:
        """Return a new view for one leader."""
        return View(self.num_blocks)

    def load(self, now_s: float, unit: str, effect: ReadBlocks) -> tuple[float, float, BlocksRead]:
        """Queue a read. Return (begin, end, result). A failed read ends at its first lost block."""
        node = unit, effect.rank // self._node_ranks
        num = self._num_loaded(now_s, node, len(effect.into))
        begin_s, end_s = self._reads.ask(now_s, node, num * self._block_bytes)
        error = None if num == len(effect.into) else "input/output error"
        return begin_s, end_s, BlocksRead(effect.read_id, num, 0, error)

    def store(self, now_s: float, unit: str, effect: StoreBlocks) -> tuple[float, BlocksStored]:
        """Queue a write. Return its end and its result."""
        num = len(effect.block_ids)
        _, end_s = self._writes.ask(
            now_s, (unit, effect.rank // self._node_ranks), num * self._block_bytes
        )
        return end_s, BlocksStored(effect.store_id, (_HERE,) * num)

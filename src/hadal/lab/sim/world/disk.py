"""The disk cache of a simulated world: which blocks it has, and what reading and writing them
takes.

    leader: find (View) -> ReadBlocks --> queue of the rank's node --> BlocksRead
                           StoreBlocks -> queue of the rank's node --> BlocksStored, found from
                           then on

What there is is a number for each request: so many first blocks of it. A node's ranks share its
storage NIC, one read behind the other, and writes beside the reads, for a link carries both ways
at once. Nothing is read or written: a block's text is its name.

Knows no roles and no prices of steps.
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
"""The location of every block: nobody looks there."""


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of the storage network, by node. Raises ValueError for a speed that is none."""

    read_bytes_per_s: float = 40.0 * GIB
    """Peak of the KV cache's clients (3FS README), of a NIC of 400 Gb/s that only storage uses
    (arXiv 2505.09343).
    """
    write_bytes_per_s: float = 40.0 * GIB
    """Taken to be the same: the NIC's other direction."""
    latency_s: float = 0.0
    """Time of a read or write beside its bytes; none was published."""
    node_ranks: int = 8
    """Ranks that share a NIC."""

    def __post_init__(self) -> None:
        if (
            min(self.read_bytes_per_s, self.write_bytes_per_s) <= 0.0
            or self.latency_s < 0.0
            or self.node_ranks < 1
        ):
            raise ValueError(
                f"{self}: bytes/s and ranks of a node must be above 0, the latency not below."
            )


class View:
    """A leader's index of what is on disk (kv/disk_index).

    `num_blocks`: by request, shared by all views. What a read did not find is not looked for again
    by this leader.
    """

    def __init__(self, num_blocks: Ints) -> None:
        self._num_blocks = num_blocks
        self._dropped: dict[int, int] = {}
        """Request -> its first block that is gone."""

    def __len__(self) -> int:
        return 0  # Nobody counts them.

    def __contains__(self, name: bytes) -> bool:
        return self.find(name) is not None

    def put(self, names: bytes, locations: Sequence[DiskLocation | None]) -> None:
        """These are on disk, where the blocks before them are, too: there is no telling that some
        in between are not.
        """
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
        """These cannot be found any more."""
        for name in split(names):
            known = self._known(name)
            if known is not None:
                self._dropped[known[0]] = min(known[1], self._dropped.get(known[0], known[1]))

    def find(self, name: bytes) -> DiskLocation | None:
        """Where a block is."""
        known = self._known(name)
        return _HERE if known is not None and known[1] < self._end_of(known[0]) else None

    def found(self, names: bytes) -> tuple[DiskLocation, ...]:
        """Where those of these blocks are that are here."""
        known = self._known(names[:NAME_BYTES]) if names else None
        end = num_names(names)
        if (
            known is not None
            and names == chain_of(known[0], known[1] + end)[known[1] * NAME_BYTES :]
        ):
            return (_HERE,) * min(
                end, max(0, self._end_of(known[0]) - known[1])
            )  # As always: a part of one text.
        return tuple(location for name in split(names) if (location := self.find(name)) is not None)

    def num_found(self, chain: bytes) -> int:
        """How many of the chain's first blocks are here, up to one that is not."""
        known = self._known(chain[:NAME_BYTES]) if chain else None
        return (
            0 if known is None else min(num_names(chain), max(0, self._end_of(known[0]) - known[1]))
        )

    def lookup(self, chain: bytes) -> tuple[DiskLocation, ...]:
        """The locations of the longest prefix of the chain that is here."""
        return (_HERE,) * self.num_found(chain)

    def _known(self, name: bytes) -> tuple[int, int] | None:
        found = block_of(name)
        return found if found is not None and found[0] < len(self._num_blocks) else None

    def _end_of(self, number: int) -> int:
        """Return the number behind the request's first blocks that are here."""
        num = int(self._num_blocks[number])
        return min(num, self._dropped.get(number, num)) if self._dropped else num


class NodeQueues:
    """When the NICs of nodes are done with what they were asked for."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s: dict[tuple[str, int], float] = {}

    def ask(self, now_s: float, node: tuple[str, int], num_bytes: float) -> tuple[float, float]:
        """When so many bytes begin to move, and when they are there."""
        begin_s = max(now_s, self._free_s.get(node, 0.0))
        self._free_s[node] = begin_s + num_bytes / self._bytes_per_s
        return begin_s, self._free_s[node] + self._latency_s


class WorldDisk:
    """Reads and writes of all units. `block_bytes`: of all layers.

    `num_loaded`: (now, unit and index of its node, blocks of a read) -> blocks that the read brings.
    """

    def __init__(
        self,
        num_blocks: Ints,
        block_bytes: float,
        speed: DiskSpeed,
        num_loaded: Callable[[float, tuple[str, int], int], int] = lambda now_s, node, num: num,
    ) -> None:
        self.num_blocks = num_blocks
        """Blocks of each request."""
        self._block_bytes = block_bytes
        self._node_ranks = speed.node_ranks
        self._reads = NodeQueues(speed.read_bytes_per_s, speed.latency_s)
        self._writes = NodeQueues(speed.write_bytes_per_s, speed.latency_s)
        self._num_loaded = num_loaded

    def view(self) -> View:
        """Make the view of one more leader."""
        return View(self.num_blocks)

    def load(self, now_s: float, unit: str, effect: ReadBlocks) -> tuple[float, float, BlocksRead]:
        """When a read begins and ends, and what comes of it. One that fails does so at its first
        missing block.
        """
        node = unit, effect.rank // self._node_ranks
        num = self._num_loaded(now_s, node, len(effect.into))
        begin_s, end_s = self._reads.ask(now_s, node, num * self._block_bytes)
        error = None if num == len(effect.into) else "input/output error"
        return begin_s, end_s, BlocksRead(effect.read_id, num, 0, error)

    def store(self, now_s: float, unit: str, effect: StoreBlocks) -> tuple[float, BlocksStored]:
        """When a write ends, and what comes of it."""
        num = len(effect.block_ids)
        _, end_s = self._writes.ask(
            now_s, (unit, effect.rank // self._node_ranks), num * self._block_bytes
        )
        return end_s, BlocksStored(effect.store_id, (_HERE,) * num)

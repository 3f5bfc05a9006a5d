"""Ledgers of the disk cache driven by block names alone, without files: one writer's disk slots and
one leader's (scheduler's) index. They are the server's own classes.

Calls come in the order of the live system: the leader looks up a chain and counts uses, reports
them to the writer every 2 s, and allocates disk slots 32 blocks at a time. Does not depend on
sessions or sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.core.cache import NAME_BYTES, split
from hadal.kv.disk_index import DiskIndex
from hadal.kv.disk_slots import DiskSlots
from hadal.policy.eviction import Arc, Lru

STORE_BLOCKS = 32
"""Blocks that get disk slots in one call, as in the live store."""
POLL_S = 2.0
"""Seconds between two reports of uses to the writer."""
_SEGMENT = 0


class DiskReplay:
    """Disk with `num_disk_slots`. Times of calls must not decrease."""

    def __init__(self, num_disk_slots: int, policy: type[Arc | Lru] = Arc) -> None:
        self.disk_slots, self.index = DiskSlots(policy), DiskIndex()
        self.disk_slots.add_segment(_SEGMENT, num_disk_slots)
        self.num_written = 0
        self.num_runs = 0
        """Number of runs of written blocks in adjacent slots, counted within one allocation."""
        self._used: dict[int, int] = {}
        self._poll_at_s = float("-inf")

    def find(self, at_s: float, chain: bytes) -> int:
        """Return how many leading blocks of `chain` (joined names) are on disk; count uses."""
        if at_s >= self._poll_at_s:
            self.disk_slots.used(_SEGMENT, list(self._used), list(self._used.values()))
            self._used.clear()
            self._poll_at_s = at_s + POLL_S
        found = self.index.lookup(chain)
        used = self._used
        for location in found:
            used[location.disk_slot] = used.get(location.disk_slot, 0) + 1
        return len(found)

    def store(self, chain: bytes, first: int = 0) -> tuple[list[bytes], list[bytes]]:
        """Write the blocks of the chain from index `first` on that are not on disk yet. Return the
        names of written and of evicted blocks.
        """
        rest = chain[first * NAME_BYTES :]
        new = [(name, at) for at, name in enumerate(split(rest), first) if name not in self.index]
        written: list[bytes] = []
        dropped: list[bytes] = []
        for begin in range(0, len(new), STORE_BLOCKS):
            names, positions = zip(*new[begin : begin + STORE_BLOCKS], strict=True)
            kept, gone = self._store(names, positions)
            written += kept
            dropped += gone
        return written, dropped

    def check(self) -> list[str]:
        """Return problems: inconsistent disk slots, or another number of blocks in the index."""
        problems = self.disk_slots.check()
        if len(self.disk_slots) != len(self.index):
            problems.append(
                f"{len(self.disk_slots)} blocks have disk slots, {len(self.index)} can be found"
            )
        return problems

    def _store(
        self, names: Sequence[bytes], positions: Sequence[int]
    ) -> tuple[list[bytes], list[bytes]]:
        locations, dropped = self.disk_slots.take(names, positions)
        self.index.drop(dropped)
        self.index.put(b"".join(names), locations)
        kept = [
            name for name, location in zip(names, locations, strict=True) if location is not None
        ]
        self.disk_slots.wrote(kept)
        at = [location.disk_slot for location in locations if location is not None]
        self.num_runs += sum(
            slot - 1 != before for slot, before in zip(at, [-9, *at], strict=False)
        )
        self.num_written += len(at)
        return kept, list(split(dropped))

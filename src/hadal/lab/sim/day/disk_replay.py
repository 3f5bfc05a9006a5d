"""The disk cache's ledgers driven by names alone: one writer's disk slots and one leader's index, as
they serve, no file.

What the live system does to them in the same order: a leader looks a chain up and counts uses,
every two seconds the writer hears of those, and blocks are given disk slots 32 at a time.

Knows no sessions and no sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.core.cache import NAME_BYTES, split
from hadal.kv.disk_index import DiskIndex
from hadal.kv.disk_slots import DiskSlots
from hadal.policy.eviction import Arc, Lru

STORE_BLOCKS = 32
"""Given disk slots at once, as the live store takes them."""
POLL_S = 2.0
"""How often a writer hears what was used."""
_SEGMENT = 0


class DiskReplay:
    """A disk of so many disk slots. Times must not go back."""

    def __init__(self, num_disk_slots: int, policy: type[Arc | Lru] = Arc) -> None:
        self.disk_slots, self.index = DiskSlots(policy), DiskIndex()
        self.disk_slots.add_segment(_SEGMENT, num_disk_slots)
        self.num_written = 0
        self.num_runs = 0
        """Runs of written blocks that lie side by side, within one store."""
        self._used: dict[int, int] = {}
        self._poll_at_s = float("-inf")

    def find(self, at_s: float, chain: bytes) -> int:
        """How many of the chain's first blocks are here; they are used."""
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
        """Write the chain's blocks from number `first` on that are not here. Return which were, and
        which made room.
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
        """Problems; empty when the disk slots are in order and the index knows exactly what is in
        them.
        """
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

"""The disk cache's ledgers driven by names alone: one writer's slots and one leader's index, as
they serve, no file.

What the live system does to them in the same order: a leader looks a chain up and counts uses,
every two seconds the writer hears of those, and blocks are given slots 32 at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.core.cache import NAME_BYTES, split
from hadal.kv.disk_index import DiskIndex
from hadal.kv.disk_slots import DiskSlots
from hadal.policy.eviction import Arc, Lru

STORE_BLOCKS = 32
"""Given slots at once, as the live store takes them."""
POLL_S = 2.0
"""How often a writer hears what was used."""
_SEGMENT = 0


class DiskReplay:
    """A disk of so many slots. Times have to be told in order."""

    def __init__(self, num_slots: int, policy: type[Arc | Lru] = Arc) -> None:
        self.slots, self.index = DiskSlots(policy), DiskIndex()
        self.slots.add_segment(_SEGMENT, num_slots)
        self.num_written = 0
        self.num_runs = 0
        """Of written blocks that lie side by side, within one store."""
        self._used: dict[int, int] = {}
        self._poll_at_s = float("-inf")

    def find(self, at_s: float, chain: bytes) -> int:
        """How many of the chain's first blocks are here; they are used."""
        if at_s >= self._poll_at_s:
            self.slots.used(_SEGMENT, list(self._used), list(self._used.values()))
            self._used.clear()
            self._poll_at_s = at_s + POLL_S
        found = self.index.lookup(chain)
        used = self._used
        for place in found:
            used[place.slot] = used.get(place.slot, 0) + 1
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
        """Problems; empty when the slots are in order and the index knows exactly what is in
        them.
        """
        problems = self.slots.check()
        if len(self.slots) != len(self.index):
            problems.append(f"{len(self.slots)} blocks have slots, {len(self.index)} can be found")
        return problems

    def _store(
        self, names: Sequence[bytes], positions: Sequence[int]
    ) -> tuple[list[bytes], list[bytes]]:
        places, dropped = self.slots.take(names, positions)
        self.index.drop(dropped)
        self.index.put(b"".join(names), places)
        kept = [name for name, place in zip(names, places, strict=True) if place is not None]
        self.slots.wrote(kept)
        at = [place.slot for place in places if place is not None]
        self.num_runs += sum(
            slot - 1 != before for slot, before in zip(at, [-9, *at], strict=False)
        )
        self.num_written += len(at)
        return kept, list(split(dropped))

"""Choose the cache blocks to evict.

Keys are names of blocks. Time is counted in calls of `tick`, one for each group of blocks that the
owner adds or uses at once. Independent of where blocks lie, how large they are and which requests
hold them: the owner reports added, used and evictable blocks. Of keys that were used together, the
deepest in its text goes first, because a block is useless without those before it.

Owners use Arc; docs/decisions/002 compares its hits on real traces with those of Lru and others.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

Entry = tuple[int, int, bytes]
"""(tick of the last use, minus the position in its text, key); the lowest is evicted first."""


class Lru:
    """Policy that evicts the least recently used key."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        """Blocks of the cache; unused by this policy, but owners set it."""
        self._now = 0
        self._key_to_entry: dict[bytes, Entry] = {}
        self._offered: set[bytes] = set()
        self._heap: list[Entry] = []
        """Entries of every offered key, and outdated ones, which are skipped."""

    def __len__(self) -> int:
        return len(self._key_to_entry)

    def __contains__(self, key: bytes) -> bool:
        return key in self._key_to_entry

    @property
    def num_offered(self) -> int:
        return len(self._offered)

    def tick(self) -> None:
        """Advance the time: later uses count as more recent."""
        self._now += 1

    def add(self, key: bytes, position: int) -> None:
        """Add a new block. It is not evictable until it is offered."""
        self._key_to_entry[key] = (self._now, -position, key)

    def use(self, key: bytes) -> None:
        """Record another use of a cached block."""
        entry = self._key_to_entry[key]
        if entry[0] != self._now:
            entry = self._key_to_entry[key] = (self._now, entry[1], key)
            if key in self._offered:
                self._push(entry)

    def offer(self, key: bytes) -> None:
        """Mark the block as evictable."""
        if key not in self._offered:
            self._offered.add(key)
            self._push(self._key_to_entry[key])

    def withdraw(self, key: bytes) -> None:
        """Mark the block as not evictable."""
        self._offered.discard(key)

    def remove(self, key: bytes) -> None:
        """Remove a block that left the cache."""
        self.take(key)

    def take(self, key: bytes) -> tuple[int, bool]:
        """Remove a key; return its position and whether it was offered."""
        is_offered = key in self._offered
        self._offered.discard(key)
        return -self._key_to_entry.pop(key)[1], is_offered

    def victim(self) -> bytes | None:
        """Remove and return the next block to evict; None if no block is evictable."""
        while self._heap:
            entry = heappop(self._heap)
            key = entry[2]
            if key in self._offered and self._key_to_entry[key] == entry:
                self.remove(key)
                return key
        return None

    def _push(self, entry: Entry) -> None:
        heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * len(self._offered):
            self._heap = [self._key_to_entry[key] for key in self._offered]
            heapify(self._heap)


class Arc:
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003).

    Blocks used once and blocks used again are in separate LRU lists. A miss on a recently evicted
    name shows which list should have been larger. So prompts without a follow-up, however many, do
    not evict a conversation that continues.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Blocks of the cache; may grow. Each list remembers up to `capacity` evicted names."""
        self._once, self._again = Lru(), Lru()
        self._gone_once: OrderedDict[bytes, None] = OrderedDict()
        self._gone_again: OrderedDict[bytes, None] = OrderedDict()
        self._room_once = 0.0
        """Learned target size of the list of blocks used once: above it, it is evicted first."""

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: bytes) -> bool:
        return key in self._once or key in self._again

    @property
    def num_offered(self) -> int:
        return self._once.num_offered + self._again.num_offered

    def tick(self) -> None:
        """Advance the time: later uses count as more recent."""
        self._once.tick()
        self._again.tick()

    def add(self, key: bytes, position: int) -> None:
        """Add a new block. It is not evictable until it is offered."""
        num_once, num_again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            self._room_once = min(self.capacity, self._room_once + max(1.0, num_again / num_once))
            del self._gone_once[key]
        elif key in self._gone_again:
            self._room_once = max(0.0, self._room_once - max(1.0, num_once / num_again))
            del self._gone_again[key]
        else:
            self._once.add(key, position)
            return
        self._again.add(key, position)

    def use(self, key: bytes) -> None:
        """Record another use of a cached block."""
        if key in self._again:
            self._again.use(key)
            return
        position, is_offered = self._once.take(key)
        self._again.add(key, position)
        if is_offered:
            self._again.offer(key)

    def offer(self, key: bytes) -> None:
        """Mark the block as evictable."""
        self._list_of(key).offer(key)

    def withdraw(self, key: bytes) -> None:
        """Mark the block as not evictable."""
        self._list_of(key).withdraw(key)

    def remove(self, key: bytes) -> None:
        """Remove a block that left the cache for another reason than eviction."""
        self._list_of(key).remove(key)

    def victim(self) -> bytes | None:
        """Remove and return the next block to evict; None if no block is evictable."""
        is_once = len(self._once) > self._room_once or not len(self._again)
        for keys, gone in ((self._once, self._gone_once), (self._again, self._gone_again))[
            :: 1 if is_once else -1
        ]:
            key = keys.victim()
            if key is not None:
                gone[key] = None
                if len(gone) > self.capacity:
                    gone.popitem(last=False)
                return key
        return None

    def _list_of(self, key: bytes) -> Lru:
        return self._once if key in self._once else self._again

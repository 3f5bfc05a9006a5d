"""Which blocks of a cache make room for others.

Keys are names of blocks; time is counted in calls of `tick`, one for every request. Knows nothing
of where blocks lie, how large they are or who holds them: its owner says what came, what was used,
and what may go. Of keys that were used together the deepest in its text goes first, as it is of no
use without those before it.

Owners use Arc; LOG.md has its hits on real traces beside those of Lru and others.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

Entry = tuple[int, int, bytes]
"""When a key was used last, its position in its text less than 0, the key: the lowest goes
first.
"""


class Lru:
    """Evicts the key whose last use is longest ago."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        """Blocks of the cache: nothing to this policy, but owners set it."""
        self._now = 0
        self._key_to_entry: dict[bytes, Entry] = {}
        self._offered: set[bytes] = set()
        self._heap: list[Entry] = []
        """Holds an entry of every offered key, and others that are out of date and passed over."""

    def __len__(self) -> int:
        return len(self._key_to_entry)

    def __contains__(self, key: bytes) -> bool:
        return key in self._key_to_entry

    @property
    def num_offered(self) -> int:
        return len(self._offered)

    def tick(self) -> None:
        """Time goes on: what is used from now on was used later."""
        self._now += 1

    def add(self, key: bytes, position: int) -> None:
        """A block came. It may not be evicted before it is offered."""
        self._key_to_entry[key] = (self._now, -position, key)

    def use(self, key: bytes) -> None:
        """A block that is here was used again."""
        entry = self._key_to_entry[key]
        if entry[0] != self._now:
            entry = self._key_to_entry[key] = (self._now, entry[1], key)
            if key in self._offered:
                self._push(entry)

    def offer(self, key: bytes) -> None:
        """It may be evicted from now on."""
        if key not in self._offered:
            self._offered.add(key)
            self._push(self._key_to_entry[key])

    def withdraw(self, key: bytes) -> None:
        """It may not, for now."""
        self._offered.discard(key)

    def remove(self, key: bytes) -> None:
        """It is gone."""
        self.take(key)

    def take(self, key: bytes) -> tuple[int, bool]:
        """Remove a key; return its position and whether it was offered."""
        is_offered = key in self._offered
        self._offered.discard(key)
        return -self._key_to_entry.pop(key)[1], is_offered

    def victim(self) -> bytes | None:
        """Take out the next to go. None if nothing is offered."""
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
    """Adaptive replacement (Megiddo and Modha, FAST 2003): what was used once and what was used
    again are apart, each evicted by age, and what is missed soon after it went says which of the
    two should have had more room.

    A conversation that goes on is thus not pushed out by prompts that nobody continues, however
    many they are.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Blocks of the cache, which may grow. As many names of evicted ones are remembered of
        either kind.
        """
        self._once, self._again = Lru(), Lru()
        self._gone_once: OrderedDict[bytes, None] = OrderedDict()
        self._gone_again: OrderedDict[bytes, None] = OrderedDict()
        self._room_once = 0.0
        """Blocks that those used once may have before they make room. Learned."""

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: bytes) -> bool:
        return key in self._once or key in self._again

    @property
    def num_offered(self) -> int:
        return self._once.num_offered + self._again.num_offered

    def tick(self) -> None:
        """Time goes on: what is used from now on was used later."""
        self._once.tick()
        self._again.tick()

    def add(self, key: bytes, position: int) -> None:
        """A block came. It may not be evicted before it is offered."""
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
        """A block that is here was used again."""
        if key in self._again:
            self._again.use(key)
            return
        position, is_offered = self._once.take(key)
        self._again.add(key, position)
        if is_offered:
            self._again.offer(key)

    def offer(self, key: bytes) -> None:
        """It may be evicted from now on."""
        self._list_of(key).offer(key)

    def withdraw(self, key: bytes) -> None:
        """It may not, for now."""
        self._list_of(key).withdraw(key)

    def remove(self, key: bytes) -> None:
        """It is gone, and not because there was no room."""
        self._list_of(key).remove(key)

    def victim(self) -> bytes | None:
        """Take out the next to go. None if nothing is offered."""
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

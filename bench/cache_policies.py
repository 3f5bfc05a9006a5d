"""The eviction policies that were tried, beside the one that is used: what share of prompt tokens
each finds.

    python -m bench.cache_policies [--quick]

Mooncake's traces (generated chats where they are not), whole and in halves that begin with nothing,
through kv/blocks, with the trace's own parts of 512 tokens as blocks, so that there are an eighth
as many. Budgets are shares of the working set. "best" knows the future, "all" forgets nothing (see
bench/cache_replay).

ARC is what is used (policy/eviction). LFU ages by halves. The others are two queues by age, and
differ in what brings a block from the first to the main one, and in which of them gives way:
S3-FIFO (Yang et al., SOSP 2023; a block moves on that was used twice, or once), 2Q (Johnson and
Shasha, VLDB 1994), segmented LRU (Karedla et al., 1994), CLOCK. Constants are the publications',
but for LFU and segmented LRU, which leave them open.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import cast

from rich.console import Console
from rich.table import Table

from bench.cache_replay import QUICK_PROMPTS, SHARES, Policy, best, infinite, memory
from bench.cache_traces import Trace, chats, find
from hadal.policy.eviction import Arc, Lru

HALF_LIFE_TICKS = 1000.0
"""Of a use, to LFU. A prompt takes two: it acquires what it finds and names the rest."""


class LfuAged:
    """Evicts the key with the fewest uses, each of which counts half as much after a half-life.
    Methods are those of policy/eviction.
    """

    def __init__(self, capacity: int) -> None:
        self._now = 0
        self._key_to_entry: dict[bytes, tuple[float, int, bytes]] = {}
        """Score, position less than 0, key. The score is the logarithm of the uses as they would
        count at time 0: it stays as it is while time goes on.
        """
        self._offered: set[bytes] = set()
        self._heap: list[tuple[float, int, bytes]] = []

    def __len__(self) -> int:
        return len(self._key_to_entry)

    @property
    def num_offered(self) -> int:
        return len(self._offered)

    def tick(self) -> None:
        self._now += 1

    def add(self, key: bytes, position: int) -> None:
        self._key_to_entry[key] = (self._now / HALF_LIFE_TICKS, -position, key)

    def use(self, key: bytes) -> None:
        before, position, _ = self._key_to_entry[key]
        now = self._now / HALF_LIFE_TICKS
        self._key_to_entry[key] = (now + math.log2(1 + 2 ** (before - now)), position, key)
        if key in self._offered:
            self.offer(key)

    def offer(self, key: bytes) -> None:
        self._offered.add(key)
        heappush(self._heap, self._key_to_entry[key])

    def withdraw(self, key: bytes) -> None:
        self._offered.discard(key)

    def remove(self, key: bytes) -> None:
        self._offered.discard(key)
        del self._key_to_entry[key]

    def victim(self) -> bytes | None:
        while self._heap:
            _, _, key = entry = heappop(self._heap)
            if key in self._offered and self._key_to_entry[key] == entry:
                self.remove(key)
                return key
        return None


class Queues:
    """Two queues, uses counted, and names of what went from the first one. `use` and `choose` are
    the policy; methods are those of policy/eviction.
    """

    def __init__(
        self,
        capacity: int,
        use: Callable[[Queues, bytes], None],
        choose: Callable[[Queues], bytes | None],
    ) -> None:
        self.capacity = capacity
        self.first, self.main = Lru(), Lru()
        self.num_uses: dict[bytes, int] = {}
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._positions: dict[bytes, int] = {}
        self._use = use
        self._choose = choose

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def num_offered(self) -> int:
        return self.first.num_offered + self.main.num_offered

    def tick(self) -> None:
        self.first.tick()
        self.main.tick()

    def add(self, key: bytes, position: int) -> None:
        self._positions[key], self.num_uses[key] = position, 0
        self.put(key, self.main if key in self._gone else self.first, is_offered=False)
        self._gone.pop(key, None)

    def use(self, key: bytes) -> None:
        self._use(self, key)

    def offer(self, key: bytes) -> None:
        self._queue_of(key).offer(key)

    def withdraw(self, key: bytes) -> None:
        self._queue_of(key).withdraw(key)

    def remove(self, key: bytes) -> None:
        self._queue_of(key).remove(key)
        del self._positions[key], self.num_uses[key]

    def victim(self) -> bytes | None:
        key = self._choose(self)
        if key is not None:
            del self._positions[key], self.num_uses[key]
        return key

    # ---- for the policies ----
    def pop(self, *, is_first: bool) -> tuple[bytes, bool] | tuple[None, bool]:
        """Take out the oldest that may go, of the first queue if `is_first` and there is one there,
        and the reverse. Return it and whether it was in the first.
        """
        for was_first in (is_first, not is_first):
            key = (self.first if was_first else self.main).victim()
            if key is not None:
                return key, was_first
        return None, False

    def put(self, key: bytes, queue: Lru, *, is_offered: bool = True) -> None:
        """As the youngest of a queue."""
        queue.add(key, self._positions[key])
        if is_offered:
            queue.offer(key)

    def remember(self, key: bytes, share: float) -> None:
        """It went; when it comes again it belongs into the main queue. For so many, as a share of
        the blocks.
        """
        self._gone[key] = None
        while len(self._gone) > share * self.capacity:
            self._gone.popitem(last=False)

    def _queue_of(self, key: bytes) -> Lru:
        return self.first if key in self.first else self.main


def count_use(queues: Queues, key: bytes, *, most: int) -> None:
    queues.num_uses[key] = min(most, queues.num_uses[key] + 1)


def use_in_main(queues: Queues, key: bytes, *, moves: bool) -> None:
    """By its last use there; out of the first queue it `moves` there or stays as it is."""
    if key in queues.main:
        queues.main.use(key)
    elif moves:
        queues.put(key, queues.main, is_offered=queues.first.take(key)[1])


def s3_fifo(queues: Queues, *, num_uses: int) -> bytes | None:
    """First in, first out; what was used `num_uses` times goes on to the main queue, and goes round
    in that.
    """
    while True:
        key, was_first = queues.pop(is_first=len(queues.first) > 0.1 * queues.capacity)
        if key is None or queues.num_uses[key] < (num_uses if was_first else 1):
            if key is not None and was_first:
                queues.remember(key, 0.9)
            return key
        queues.num_uses[key] = 0 if was_first else queues.num_uses[key] - 1
        queues.put(key, queues.main)


def clock(queues: Queues) -> bytes | None:
    """First in, first out; what was used goes round once more."""
    while True:
        key, _ = queues.pop(is_first=True)
        if key is None or not queues.num_uses[key]:
            return key
        queues.num_uses[key] = 0
        queues.put(key, queues.first)


def two_queues(queues: Queues) -> bytes | None:
    """First in, first out; what comes again soon after it went is kept by its last use."""
    key, was_first = queues.pop(is_first=len(queues.first) > 0.25 * queues.capacity)
    if key is not None and was_first:
        queues.remember(key, 0.5)
    return key


def slru(queues: Queues) -> bytes | None:
    """What was used again has half of the room, and falls back from there."""
    while len(queues.main) > 0.5 * queues.capacity and (key := queues.main.victim()) is not None:
        queues.put(key, queues.first)
    return queues.pop(is_first=True)[0]


POLICIES: dict[str, Callable[[int], LfuAged | Queues | Lru | Arc]] = {
    "ARC": Arc,
    "LRU": Lru,
    "LFU": LfuAged,
    "S3-FIFO 2": partial(
        Queues, use=partial(count_use, most=3), choose=partial(s3_fifo, num_uses=2)
    ),
    "S3-FIFO 1": partial(
        Queues, use=partial(count_use, most=3), choose=partial(s3_fifo, num_uses=1)
    ),
    "2Q": partial(Queues, use=partial(use_in_main, moves=False), choose=two_queues),
    "SLRU": partial(Queues, use=partial(use_in_main, moves=True), choose=slru),
    "CLOCK": partial(Queues, use=partial(count_use, most=1), choose=clock),
}


def share_of(trace: Trace, num_blocks: int, policy: str) -> float:
    """Of the prompt tokens, through the real ledger, which asks of an eviction no more than these
    have.
    """
    return memory(trace, num_blocks, cast(Policy, POLICIES[policy])).share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cache_policies", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"the first {QUICK_PROMPTS} prompts of each trace"
    )
    options = parser.parse_args(arguments)
    table = Table(title="share of prompt tokens found, %", box=None)
    for title in ("trace, budget", *POLICIES, "best", "all"):
        table.add_column(
            title, justify="left" if title == "trace, budget" else "right", no_wrap=True
        )
    for whole in [trace.in_parts() for trace in find() or [chats(0)]]:
        for trace in (
            [Trace(whole.name, whole.prompts[:QUICK_PROMPTS])]
            if options.quick
            else [whole, *whole.halves()]
        ):
            for share in SHARES:
                num_blocks = max(1, int(share * trace.num_blocks()))
                shares = [share_of(trace, num_blocks, policy) for policy in POLICIES]
                most = [best(trace, num_blocks), sum(infinite(trace)) / trace.num_tokens]
                table.add_row(
                    f"{trace.name}, {share:.0%}",
                    *(f"{100 * found:.2f}" for found in (*shares, *most)),
                )
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])

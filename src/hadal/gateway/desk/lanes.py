"""Threads that process bodies before admission, so that costly bodies do not delay cheap ones.

    short      bodies of at most SHORT_BYTES, which bounds the wait for another tenant's turn
    long       larger bodies, bounded by the model's context (gateway/text/lengths)
    grammars   schemas and tools; a check may end the process that checks them, which then restarts

In each lane a tenant has one request at a time, so tenants take turns. The tokenizer library
releases the interpreter's lock, so all lanes and the event loop run at the same time. Independent
of HTTP, tokenizers and models.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SHORT_BYTES = 32 * 1024
"""Longest body of the short lane. A tokenizer takes 1 to 2 ms per KiB."""


class Lane:
    """One thread, and the tenants' turns in it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._tenant_to_turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, tenant: str, make: Callable[[], T]) -> T:
        """Run `make` in the thread, after the tenant's earlier calls."""
        async with self._tenant_to_turn[tenant]:
            return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def close(self) -> None:
        """End the thread and cancel calls that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """Lanes for short bodies, long bodies and grammars."""

    def __init__(self) -> None:
        self.short, self.long = Lane("tokenise"), Lane("tokenise-long")
        self.grammars = Lane("grammars")

    def for_bytes(self, num_bytes: int) -> Lane:
        """Return the lane for a body; `num_bytes` includes other data read for it."""
        return self.short if num_bytes <= SHORT_BYTES else self.long

    def close(self) -> None:
        """End the threads of all lanes."""
        for lane in (self.short, self.long, self.grammars):
            lane.close()

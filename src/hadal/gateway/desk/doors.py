"""State of a gateway that may be draining: does it admit requests, and is any generation open?"""

from __future__ import annotations

import asyncio


class Doors:
    """Two events of a gateway: it drains, and it is idle."""

    def __init__(self) -> None:
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """True once nothing new is admitted."""
        return self._draining.is_set()

    async def wait_draining(self) -> None:
        """Wait until a drain is requested. There is no timeout: callers cancel it as they end."""
        await self._draining.wait()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no generation is open, and no other gateway depends on this one's front.
        Return False after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

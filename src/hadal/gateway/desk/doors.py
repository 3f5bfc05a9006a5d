"""The state of a gateway that may be draining: whether it admits requests, and whether any is open."""

from __future__ import annotations

import asyncio


class Doors:
    """Whether a gateway takes anything new, and whether anything runs that it took."""

    def __init__(self) -> None:
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Nothing new is taken."""
        return self._draining.is_set()

    async def wait_draining(self) -> None:
        """Wait until a drain is asked for; the caller bounds it by the life of the process."""
        await self._draining.wait()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no generation is open, and no other gateway is there that this one has the
        front for. False after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

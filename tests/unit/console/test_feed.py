"""The feed goes on whatever a look at the server brings."""

from __future__ import annotations

import asyncio

import pytest

from hadal.console import feed
from hadal.console.feed import Feed, Watcher
from hadal.gateway.frames import ConsoleFrame

FRAME = ConsoleFrame(1.0, None, None, None, {}, (), {}, "")


class Source:
    """Its second look fails as no one expected."""

    def __init__(self) -> None:
        self.num_looks = 0

    async def check(self, key: str) -> None:
        return None

    async def frame(self, key: str, experts: set[str], traced: set[str]) -> ConsoleFrame:
        self.num_looks += 1
        if self.num_looks == 2:
            raise ZeroDivisionError("what nobody thought of")
        return FRAME


def test_an_error_that_nobody_expected_is_logged_and_the_console_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed, "PERIOD_S", 0.0)
    shown: list[ConsoleFrame] = []

    async def scene() -> None:
        watched = Feed(Source())
        watcher = Watcher("", shown.append, lambda reason: None)
        watched.watch(watcher)
        async with asyncio.timeout(30):
            while len(shown) < 3:
                await asyncio.sleep(0.02)
        watched.forget(watcher)

    asyncio.run(scene())
    assert "what nobody thought of" in caplog.text

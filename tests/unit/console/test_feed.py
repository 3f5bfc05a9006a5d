"""The feed goes on whatever a look at the server brings, and reads of money what it can afford."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hadal.console import feed
from hadal.console.feed import Feed, Watcher, reports
from hadal.core.facts import NodesFact, PackedFacts
from hadal.gateway.frames import ConsoleFrame
from hadal.runtime.ledger.store import Store, ledger_url
from tests.unit.stats.facts import START_S, random_facts

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


def test_what_tenants_cost_is_what_was_paid_until_there_are_too_many_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store(ledger_url(str(tmp_path / "l.sqlite")))
    store.prepare()
    units = tuple(
        NodesFact(f"{role}-0", "e", role, 8, 8, START_S, START_S + 86_400.0, "", 2_000_000)
        for role in ("prefill", "decode")
    )
    store.write(PackedFacts(tuple(random_facts(3, 60)), units))
    now_us = int((START_S + 86_400.0) * 1e6)
    money = reports(store, now_us)
    costs = [line["cost_used_usd"] + line["cost_idle_usd"] for line in money["tenant"]["tenants"]]
    assert len(costs) == 4
    assert min(costs) > 0
    assert sum(costs) == pytest.approx(money["hour"]["cost_usd"], abs=1e-6)
    monkeypatch.setattr(feed, "MOST_SPANS", 59)
    summed = reports(store, now_us)
    assert "cost_used_usd" not in summed["tenant"]
    assert summed["hour"] == money["hour"]
    store.close()

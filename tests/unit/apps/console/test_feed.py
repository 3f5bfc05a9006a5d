"""The console's feed: it survives any error while it reads from the server, and shows costs per tenant
only up to MOST_SPANS requests.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hadal.apps.console import feed
from hadal.apps.console.feed import Feed, LiveSource, Watcher, reports
from hadal.apps.console.series import Series
from hadal.core.facts import NodesFact, PackedFacts
from hadal.core.messages.snapshot import FrontSnapshot, Totals
from hadal.core.overview import EXPERTS_MAX, Buckets, Overview, UnitExperts
from hadal.gateway.desk.frames import ConsoleFrame
from hadal.runtime.ledger.address import ledger_url
from hadal.runtime.ledger.store import Store
from hadal.runtime.process.logs import LOGS_FOLDER
from hadal.runtime.process.status import Status, write_status
from tests.unit.stats.facts import START_S, random_facts
from tests.waiting import DEADLINE_S, wait_for

FRAME = ConsoleFrame(1.0, None, None, None, {}, (), {}, "")


class Source:
    """Source of frames that raises an unexpected error at its second frame."""

    def __init__(self) -> None:
        self.num_looks = 0

    async def check(self, key: str) -> None:
        return None

    async def frame(self, key: str, experts: set[str], traced: set[str]) -> ConsoleFrame:
        self.num_looks += 1
        if self.num_looks == 2:
            raise ZeroDivisionError("what nobody thought of")
        return FRAME


async def test_an_error_that_nobody_expected_is_logged_and_the_console_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed, "PERIOD_S", 0.0)
    shown: list[ConsoleFrame] = []
    watched = Feed(Source())
    watcher = Watcher("", shown.append, lambda reason: None)
    watched.watch(watcher)
    await wait_for(lambda: len(shown) == 3, "three frames are shown")
    watched.forget(watcher)
    assert "what nobody thought of" in caplog.text


@pytest.mark.promise("Used and idle GPU-hours, and their cost, add up to what was paid for.")
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


UNITS = [f"decode-{number}" for number in range(EXPERTS_MAX + 2)]


def overview(unix_s: float, counts: tuple[float, float] = (0.0, 0.0), **more: Any) -> Overview:
    up = {"decode": dict.fromkeys(UNITS, 4)}
    snapshot = FrontSnapshot(False, {}, {}, up, Totals())
    latency = {"first_token": Buckets((1.0, 2.0), (*counts, counts[-1]))}
    return Overview(unix_s, "m", "ready", (), {}, {}, snapshot, latency, **more)


class Gateway:
    """Gateway that answers like the real one: for at most EXPERTS_MAX units per request."""

    async def page(self, path: str, key: str, **query: str) -> bytes:
        asked = [unit for unit in query["experts"].split(",") if unit]
        assert len(asked) <= EXPERTS_MAX
        told = dict.fromkeys(asked, UnitExperts(((1.0,),), ((1.0,),), ((1,),)))
        return msgspec.json.encode(overview(1.0, experts=told))


def live(folder: Path | None = None, ledger: str = "") -> LiveSource:
    return LiveSource(Gateway(), folder, ledger)  # type: ignore[arg-type]


async def test_every_page_gets_its_units_experts_however_many_there_are() -> None:
    source, told = live(), []
    for asked in (set(UNITS), set(UNITS), {UNITS[0], "decode-99"}):
        frame = await source.frame("", asked, set())
        assert frame.overview is not None
        told.append(set(frame.overview.experts))
    first, second, fewer = told
    assert len(first) == EXPERTS_MAX
    assert second == set(UNITS)
    assert fewer == {UNITS[0]}, "none of those nobody asks for, or that are not up"


async def test_a_ledger_that_does_not_answer_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers, said = threading.Event(), list[bool]()

    def slow_reports(store: Store, now_us: int) -> dict[str, Any]:
        said.append(answers.wait(DEADLINE_S))
        return {"hour": {}}

    monkeypatch.setattr(feed, "reports", slow_reports)
    monkeypatch.setattr(feed, "_MONEY_WAIT_S", 0.05)
    monkeypatch.setattr(feed, "_SLOW_PERIODS", 1)
    write_status(tmp_path, Status("", "r", 1, True, False, 1.0, {}))
    source = live(tmp_path, ledger_url(str(tmp_path / "l.sqlite")))
    for _ in range(3):
        assert not (await source.frame("", set(), set())).money
        assert not said
    answers.set()
    while not (await source.frame("", set(), set())).money:
        await asyncio.sleep(0.02)


async def test_warnings_push_out_no_error_and_the_last_of_all_processes_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(feed, "_SLOW_PERIODS", 1)
    write_status(tmp_path, Status("", "r", 1, True, False, 1.0, {}))
    (tmp_path / LOGS_FOLDER).mkdir()
    lines = [f"2026-01-01T00:00:{second:02}.000Z supervisor ERROR no" for second in range(3)]
    lines += [f"2026-01-01T00:01:00.{ms:03}Z supervisor WARNING oh" for ms in range(200)]
    (tmp_path / LOGS_FOLDER / "supervisor").write_text("\n".join(lines) + "\n")
    frame = await live(tmp_path).frame("", set(), set())
    assert [line.level for line in frame.lines[:3]] == ["ERROR"] * 3
    assert frame.lines[-1].time.endswith("00.199Z")
    assert [line.time for line in frame.lines] == sorted(line.time for line in frame.lines)


@pytest.mark.promise("Percentiles are of the last minute; without requests there are none.")
def test_percentiles_are_of_what_came_lately() -> None:
    series = Series()

    def add(unix_s: float, *counts: float) -> float | None:
        series.add(ConsoleFrame(unix_s, overview(unix_s, counts)))  # type: ignore[arg-type]
        return series.last("first_token p50")

    assert add(1.0, 100.0, 100.0) is None, "when those came nobody knows"
    assert add(3.0, 100.0, 100.0) is None
    assert add(5.0, 100.0, 110.0) == pytest.approx(1500.0)
    series.pause()
    assert add(5000.0, 900.0, 910.0) is None

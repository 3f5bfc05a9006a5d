"""Source of the console's figures: one feed for all open pages, idle while no page is open.

    /status, /trace      the gateway, with the keys of the open pages in turn
    status.json, logs    the run folder, for the supervisor's facts
    the ledger           read only, in a thread

A page gets no more frames once its key is refused. The ledger's figures cover a day, so it is read
less often than the status.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hadal.apps.console.asking import AskError, Asking
from hadal.apps.console.series import Series
from hadal.core.errors import HadalError
from hadal.core.messages.base import SUPERVISOR
from hadal.core.overview import EXPERTS_MAX, Overview, UnitExperts
from hadal.gateway.api.shapes import CacheReport, CacheReports
from hadal.gateway.desk.frames import ConsoleFrame, LogLine
from hadal.gateway.desk.trace import TraceReply
from hadal.runtime.ledger.store import Store
from hadal.runtime.process.logs import LOGS_FOLDER, KeptReader
from hadal.runtime.process.status import Status, read_fleet, read_status
from hadal.stats.report import BY, report

log = logging.getLogger("hadal.apps.console")

PERIOD_S = 2.0
"""Seconds between two frames."""
_SLOW_PERIODS = 3
"""Number of frames per read of the ledger and the logs."""
_TRACE_WAIT_S = 1.0
_MONEY_S = 86_400
MOST_SPANS = 50_000
"""Maximum number of a day's requests for costs per tenant, which need every request."""
_MONEY_WAIT_S = 1.0
"""Longest wait of a frame for the ledger, seconds; then the frame shows the last read figures."""
_NUM_LINES = 60
"""Log lines kept per level, so that many warnings do not displace errors."""
_LEVELS = ("WARNING", "ERROR", "CRITICAL")
_TEXT = re.compile(r"(\S+Z) (\S+)\s+(WARNING|ERROR|CRITICAL)\s+(.*)")


class FrameSource(Protocol):
    """Source of a feed's frames."""

    async def check(self, key: str) -> None:
        """Raise AskError if the key may not see the console."""

    async def frame(self, key: str, experts: set[str], traced: set[str]) -> ConsoleFrame:
        """Return the next frame, with the experts of the units `experts`, and a traced step of each
        of `traced`. Raises AskError with status 401 or 403.
        """

    async def requests(self, key: str) -> list[CacheReport]:
        """Return the latest requests that this key may see. Raises AskError, MsgspecError."""


class LiveSource:
    """Source for a running server. `folder`: its run folder, None on another host; `ledger_url`:
    empty without a ledger.
    """

    def __init__(self, asking: Asking, folder: Path | None, ledger_url: str) -> None:
        self._asking = asking
        self._folder = folder
        self._ledger_url = ledger_url
        self._readers: dict[str, KeptReader] = {}
        self._lines = {level: deque[LogLine](maxlen=_NUM_LINES) for level in _LEVELS}
        self._money: dict[str, Any] = {}
        self._reading: asyncio.Task[None] | None = None
        """Running read of the ledger, in a thread: a slow ledger delays no other figures."""
        self._experts: dict[str, UnitExperts] = {}
        """Last known experts of the requested units."""
        self._num_asked = 0
        self._turn = itertools.count()

    async def check(self, key: str) -> None:
        """Raise AskError if /status, which is for operators, refuses the key."""
        await self._asking.page("/status", key)

    async def frame(self, key: str, experts: set[str], traced: set[str]) -> ConsoleFrame:
        """Return a frame read from the server now; `problem` says why the overview is missing."""
        overview, problem = None, ""
        try:
            overview = await self._overview(key, experts)
        except AskError as error:
            if error.status in (401, 403):
                raise
            problem = str(error)
        except msgspec.MsgspecError as error:
            problem = f"The server's status reply is invalid ({error})."
        traces = await asyncio.gather(*(self._trace(key, unit) for unit in sorted(traced)))
        is_slow_turn = next(self._turn) % _SLOW_PERIODS == 0
        status = await asyncio.to_thread(self._look, is_slow_turn)
        if is_slow_turn and status is not None:
            await self._read_money()
        return ConsoleFrame(
            time.time(),
            overview,
            status,
            read_fleet(self._folder) if self._folder is not None else None,
            self._money,
            tuple(sorted(itertools.chain(*self._lines.values()), key=lambda line: line.time)),
            {reply.unit: reply for reply in traces if reply is not None},
            problem,
        )

    async def requests(self, key: str) -> list[CacheReport]:
        """Return the latest requests that this key may see. Raises AskError, MsgspecError."""
        body = await self._asking.page("/v1/explain_cache", key)
        return msgspec.json.decode(body, type=CacheReports).data

    async def _overview(self, key: str, experts: set[str]) -> Overview:
        """Return the overview with the units' last known experts. Raises AskError, MsgspecError."""
        asked = sorted(experts)
        first = self._num_asked % max(len(asked), 1)
        turns = (asked[first:] + asked[:first])[:EXPERTS_MAX]
        self._num_asked += EXPERTS_MAX
        body = await self._asking.page("/status", key, experts=",".join(turns))
        overview = msgspec.json.decode(body, type=Overview)
        up = {unit for units in overview.snapshot.role_to_units.values() for unit in units}
        self._experts = {
            unit: found
            for unit, found in (self._experts | overview.experts).items()
            if unit in experts & up
        }
        return msgspec.structs.replace(overview, experts=self._experts)

    async def _trace(self, key: str, unit: str) -> TraceReply | None:
        """Return a traced step of the unit; None if there was none, or the request failed, for
        example because another client traces the unit.
        """
        wait_s = f"{_TRACE_WAIT_S:g}"
        try:
            body = await self._asking.page("/trace", key, unit=unit, steps="1", wait_s=wait_s)
            return msgspec.json.decode(body, type=TraceReply)
        except (AskError, msgspec.MsgspecError):
            return None

    def _look(self, is_slow_turn: bool) -> Status | None:
        if self._folder is None:
            return None
        status = read_status(self._folder)
        if is_slow_turn and status is not None:
            self._read_logs(self._folder, status)
        return status

    def _read_logs(self, folder: Path, status: Status) -> None:
        found = []
        for name in (*status.processes, SUPERVISOR):
            if name not in self._readers:
                self._readers[name] = KeptReader(folder / LOGS_FOLDER, name)
            for line in self._readers[name].read():
                parsed = parse_line(line.decode("utf-8", "replace"))
                if parsed is not None:
                    found.append(parsed)
        for warning in sorted(found, key=lambda one: one.time):
            self._lines[warning.level].append(warning)

    async def _read_money(self) -> None:
        """Start reading the ledger unless a read is running, and wait for it briefly."""
        if self._ledger_url and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(asyncio.to_thread(self._read_ledger))
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=_MONEY_WAIT_S)

    def _read_ledger(self) -> None:
        try:
            with closing(Store(self._ledger_url)) as store:
                self._money = reports(store, int(time.time() * 1e6))
        except (HadalError, OSError, sqlite3.Error) as error:
            self._money = {"problem": str(error)}
        except Exception:
            log.exception("the ledger could not be read; the console will retry")


def reports(store: Store, now_us: int) -> dict[str, Any]:
    """Return grouping -> report of the last 24 hours. Quantiles are left out, because they need
    every request. So do costs per tenant, which are missing above MOST_SPANS requests.
    """
    from_us, to_us = now_us - _MONEY_S * 1_000_000, now_us + 1
    window = store.read(from_us, to_us, has_details=False)
    if sum(counts.num_requests for _, counts in window.tally) <= MOST_SPANS:
        window = store.read(from_us, to_us, has_details=False, has_spans=True)
    return {
        by: report(window.tally, window.nodes, from_us, to_us, by=by, spans=window.spans).as_json()
        for by in BY
    }


def parse_line(text: str) -> LogLine | None:
    """Parse a log line of level WARNING or above, as text or JSON; None for other lines."""
    if text.startswith("{"):
        try:
            said = msgspec.json.decode(text)
        except msgspec.MsgspecError:
            return None
        level = str(said.get("level", "")).upper()
        if level not in _LEVELS:
            return None
        what = str(said.get("message", "")), str(said.get("process", ""))
        return LogLine(str(said.get("time", "")), what[1], level, what[0])
    match = _TEXT.match(text)
    return LogLine(match[1], match[2], match[3], match[4].strip()) if match else None


class RecordedSource:
    """Source that repeats a simulation's recorded frames."""

    def __init__(self, frames: list[ConsoleFrame]) -> None:
        self._frames = itertools.cycle(frames)

    async def check(self, key: str) -> None:
        """Accept every key: recorded frames are not secret."""

    async def frame(self, key: str, experts: set[str], traced: set[str]) -> ConsoleFrame:
        """Return the next frame."""
        return next(self._frames)

    async def requests(self, key: str) -> list[CacheReport]:
        """Return nothing: simulated requests have no text."""
        return []


class Watcher:
    """Subscription of one open page to the feed."""

    def __init__(
        self, key: str, show: Callable[[ConsoleFrame], None], leave: Callable[[str], None]
    ):
        """`show` is called with each frame; `leave` with a reason if the key is refused or
        `show` fails.
        """
        self.key = key
        self.show = show
        self.leave = leave
        self.experts: set[str] = set()
        """Units for which the page shows experts."""
        self.traced: set[str] = set()


class Feed:
    """Poller that runs while pages are open; keeps the last 15 minutes as series."""

    def __init__(self, source: FrameSource) -> None:
        self.source = source
        self.series = Series()
        self.last: ConsoleFrame | None = None
        self._watchers: list[Watcher] = []
        self._task: asyncio.Task[None] | None = None
        self._num_polls = 0

    def watch(self, watcher: Watcher) -> None:
        """Show the watcher the last frame and every later one, until `forget`."""
        if not self._watchers:
            self.series.pause()
        self._watchers.append(watcher)
        if self.last is not None:
            watcher.show(self.last)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def forget(self, watcher: Watcher) -> None:
        """Remove a watcher; does nothing if it was removed before."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    async def _run(self) -> None:
        while self._watchers:
            start_s = time.monotonic()
            try:
                await self._poll()
            except Exception:
                log.exception("the server's status could not be read; the console will retry")
            await asyncio.sleep(max(0.1, PERIOD_S - (time.monotonic() - start_s)))

    async def _poll(self) -> None:
        keys = sorted({watcher.key for watcher in self._watchers})
        key = keys[self._num_polls % len(keys)]
        self._num_polls += 1
        experts = {unit for watcher in self._watchers for unit in watcher.experts}
        traced = {unit for watcher in self._watchers for unit in watcher.traced}
        try:
            frame = await self.source.frame(key, experts, traced)
        except AskError as error:
            for watcher in [one for one in self._watchers if one.key == key]:
                self.forget(watcher)
                watcher.leave(str(error))
            return
        self.last = frame
        self.series.add(frame)
        for watcher in [*self._watchers]:
            try:
                watcher.show(frame)
            except Exception:
                log.exception("a console page could not show a frame; it is asked to reload")
                self.forget(watcher)
                with suppress(Exception):  # The page's browser may be gone.
                    watcher.leave("This page could not show the latest data. Reload it.")

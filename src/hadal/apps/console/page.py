"""Console page: figures of the feed in seven views. Only the open view is updated."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui

from hadal.apps.console import charts
from hadal.apps.console.experts_panel import ExpertsPanel
from hadal.apps.console.feed import Feed, FrameSource, Watcher
from hadal.apps.console.fleet_panel import FleetPanel
from hadal.apps.console.money_panel import MoneyPanel
from hadal.apps.console.overview_panel import OverviewPanel
from hadal.apps.console.problems_panel import ProblemsPanel
from hadal.apps.console.requests_panel import RequestsPanel
from hadal.apps.console.shell import Door, TopBar, head
from hadal.apps.console.steps_panel import StepsPanel
from hadal.apps.console.widgets import Panel
from hadal.gateway.desk.frames import ConsoleFrame


class ConsolePage:
    """State of one open console page."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._panel: Panel | None = None
        self._shown_s = 0.0
        """Unix time of the displayed figures."""

    async def build(self) -> None:
        """Build the page, and fill it once the browser is connected."""
        head("Hadal console")
        self._bar = TopBar("console")
        self._body = ui.element("main").classes("h-console")
        client = ui.context.client
        await client.connected(timeout=30.0)
        await self._bar.remember()
        door = Door(
            "console",
            "The console shows data of all tenants. It needs a key with the operator right.",
            self._feed.source.check,
        )
        with self._body:
            await door.open(self._body, self._enter)

    async def _enter(self, key: str) -> None:
        self._bar.show_key(key)
        self._watcher = Watcher(key, self._show, self._leave)
        with ui.element("div").classes("h-tabs").props('role="tablist"'):
            self._tabs = {}
            for name in _PANELS:
                button = ui.element("button").on("click", lambda name=name: self._open(name))
                button.props('role="tab"')
                with button:
                    ui.label(name)
                self._tabs[name] = button
            self._said = ui.label("").classes("h-updated")
        self._problem = ui.label("").classes("h-problem")
        self._problem.set_visibility(False)
        self._content = ui.element("div").classes("h-content")
        self._open("Overview")
        client = ui.context.client
        client.on_delete(lambda: self._feed.forget(self._watcher))
        self._feed.watch(self._watcher)

    def _open(self, name: str) -> None:
        for other, tab in self._tabs.items():
            tab.classes(add="h-tab-here") if other == name else tab.classes(remove="h-tab-here")
        self._content.clear()
        self._watcher.experts, self._watcher.traced = set(), set()
        with self._content:
            self._panel = _PANELS[name](self._watcher, self._feed.source)
        if self._feed.last is not None:
            self._show(self._feed.last)

    def _show(self, frame: ConsoleFrame) -> None:
        with self._body:
            if frame.overview is not None:
                self._bar.model.set_text(frame.place or frame.overview.model)
            self._problem.set_text(frame.problem)
            self._problem.set_visibility(bool(frame.problem))
            if frame.overview is not None or frame.place:
                self._shown_s = frame.unix_s if frame.overview is None else frame.overview.unix_s
            if self._shown_s:
                said = "" if frame.place else "as of "
                self._said.set_text(f"{said}{charts.clock(self._shown_s)} UTC")
            if self._panel is not None:
                self._panel.show(frame, self._feed.series)
            # Tests wait for this counter: all updates of this frame were sent before it.
            ui.run_javascript("window.hadalFrames = (window.hadalFrames || 0) + 1")

    def _leave(self, reason: str) -> None:
        """Replace the page by the reason, tabs included: they would show the feed's last figures."""
        self._panel = None
        self._body.clear()
        with self._body:
            ui.label(reason).classes("h-problem")


_PANELS: dict[str, Callable[[Watcher, FrameSource], Panel]] = {
    "Overview": lambda watcher, source: OverviewPanel(),
    "Requests": lambda watcher, source: RequestsPanel(source, watcher.key),
    "Experts": lambda watcher, source: ExpertsPanel(watcher),
    "Steps": lambda watcher, source: StepsPanel(watcher),
    "Fleet": lambda watcher, source: FleetPanel(),
    "Money": lambda watcher, source: MoneyPanel(),
    "Problems": lambda watcher, source: ProblemsPanel(),
}


def add_console(feed: Feed) -> None:
    """Serve the console at `/console`."""

    @ui.page("/console")
    async def console() -> None:
        await ConsolePage(feed).build()

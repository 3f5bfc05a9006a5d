"""Shared parts of the console's panels: charts, heat maps, choice of a unit, and notes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol

from nicegui import ui

from hadal.apps.console import charts, figures
from hadal.apps.console.charts import Options
from hadal.apps.console.series import Series
from hadal.gateway.desk.frames import ConsoleFrame


class Panel(Protocol):
    """One view of the console."""

    def show(self, frame: ConsoleFrame, series: Series) -> None: ...


class Chart:
    """Chart with a title, drawn by the page's script while it is in view. Options are not a
    property of the element, because ECharts would read them through Vue's proxies, which is slower
    than drawing.
    """

    def __init__(self, title: str, note: str = "", classes: str = "") -> None:
        with ui.element("section").classes(f"h-panel {classes}"):
            ui.html(f"<h2>{title}</h2>")
            if note:
                ui.label(note).classes("h-note")
            self._chart = ui.echart({}).classes("h-chart")
        self._client = ui.context.client
        self._drawn = ""

    def show(self, options: Options) -> None:
        """Draw the chart with these options, if they have changed."""
        text = json.dumps(options)
        if text != self._drawn:
            self._drawn = text
            self._client.run_javascript(f"hadal.chart({self._chart.id}, {text})")


class HeatMap:
    """Map of loads by layer, drawn by the page's script: ECharts takes seconds for a fleet's map."""

    def __init__(self, title: str, note: str, column: str, most: float) -> None:
        self._most = most
        with ui.element("section").classes("h-panel"):
            ui.html(f"<h2>{title}</h2>")
            ui.label(note).classes("h-note")
            self._canvas = ui.element("canvas").classes("h-heat")
            self._canvas.props(f'data-column="{column}" data-most="{most:g}"')
            ui.html(
                f'<div class="h-heat-foot"><span>a row is a layer, a column {column}</span>'
                f'<span>nothing<i class="h-ramp"></i>{most:g} times the mean</span></div>'
            )
        self._client = ui.context.client
        self._drawn = ""

    def show(self, rows: Sequence[Sequence[float]]) -> None:
        """Draw these loads, if they have changed."""
        num_columns, cells = charts.heat(rows, self._most)
        if cells != self._drawn:
            self._drawn = cells
            self._client.run_javascript(f'hadal.heat({self._canvas.id}, {num_columns}, "{cells}")')


class Picker:
    """Row of buttons with one chosen button."""

    def __init__(self, choose: Callable[[str], None]) -> None:
        self._choose = choose
        self._box = ui.element("div").classes("h-picker").props('role="tablist"')
        self._labels: dict[str, str] = {}
        self.chosen = ""

    def offer(self, names: Sequence[str], labels: Sequence[str] = ()) -> None:
        """Set the choices; if the current choice is not among them, choose the first."""
        name_to_label = dict(zip(names, labels or names, strict=True))
        if list(name_to_label.items()) == list(self._labels.items()):
            return
        self._labels = name_to_label
        if self.chosen not in names:
            self.chosen = names[0] if names else ""
        self._draw()

    def _draw(self) -> None:
        self._box.clear()
        with self._box:
            for name, label in self._labels.items():
                button = ui.element("button").on("click", lambda name=name: self._pick(name))
                if name == self.chosen:
                    button.classes("h-picked")
                with button:
                    ui.label(label)

    def _pick(self, name: str) -> None:
        self.chosen = name
        self._draw()
        self._choose(name)


def nothing_of(unit: str, frame: ConsoleFrame, why: str) -> str:
    """Return the note for a unit without data. `why`: the reason if a live server's unit is up."""
    overview = frame.overview
    is_up = overview is not None and any(
        unit in units for units in overview.snapshot.role_to_units.values()
    )
    if frame.place:
        why = "The recording has experts and steps of some units only."
    elif not is_up:
        why = "The unit is down."
    return figures.empty(f"No data of {unit} yet", why)


def empty_note(frame: ConsoleFrame, title: str, text: str) -> str:
    """Return a note that data are missing; without a status, that only the server's host has them."""
    if frame.status is None:
        title = "Only available on the server's host"
        text = "To see it, run hadal console on the server's host."
    return figures.empty(title, text)


def table_or_note(
    frame: ConsoleFrame, heads: Sequence[str], rows: Sequence[Sequence[str]], title: str, text: str
) -> str:
    """Return a table of texts, or a note if it has no rows."""
    if not rows:
        return empty_note(frame, title, text)
    return figures.table(heads, rows, num_text=len(heads))

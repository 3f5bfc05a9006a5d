"""Console panel of the fleet: demand with forecast, and decisions on the number of units."""

from __future__ import annotations

from html import escape

from nicegui import ui

from hadal.apps.console import charts, figures
from hadal.apps.console.series import Series
from hadal.apps.console.widgets import Chart, empty_note
from hadal.core.config import ROLES
from hadal.gateway.desk.frames import ConsoleFrame


class FleetPanel:
    """Panel with demand and forecast, and the number of units with reasons."""

    def __init__(self) -> None:
        self._facts = ui.html("", sanitize=False)
        self._body = ui.element("div").classes("h-grid")
        with self._body:
            self._charts = {
                role: Chart(f"Demand for {role}", "Measured demand and forecast.") for role in ROLES
            }
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Decisions</h2>")
            self._changes = ui.html("", sanitize=False)

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Update the panel."""
        fleet = frame.fleet
        self._body.set_visibility(fleet is not None)
        if fleet is None:
            self._facts.set_content("")
            self._changes.set_content(
                empty_note(
                    frame,
                    "The number of units is fixed",
                    'With mode = "auto" in the [fleet] table, units start when demand'
                    " exceeds capacity and stop when they are not needed. This page shows"
                    " each decision.",
                )
            )
            return
        items = [("Nodes", f"{fleet.num_nodes:,}", f"of {fleet.num_nodes_max:,}")]
        for role, seen in fleet.roles.items():
            items.append(
                (f"{role.capitalize()} units", f"{seen.num_wanted}", figures.spread(seen.states))
            )
            self._charts[role].show(
                charts.demand(
                    seen.times_s,
                    seen.rates,
                    fleet.now_s,
                    seen.ahead_s,
                    seen.forecast,
                    seen.unit_rate * seen.num_wanted,
                )
            )
        self._facts.set_content(figures.facts(items))
        rows = [
            (
                charts.moment(change.at_s, fleet.now_s),
                str(change.prefill),
                str(change.decode),
                change.why,
            )
            for change in reversed(fleet.changes)
        ]
        now = f'<p class="h-note">Last: {escape(fleet.why or "none yet")}</p>'
        self._changes.set_content(
            now + figures.table(("time", "prefill", "decode", "why"), rows[:40], num_text=4)
            if rows
            else now
            + figures.empty("No changes", "The number of units is the same as at the start.")
        )

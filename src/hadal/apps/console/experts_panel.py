"""Console panel of experts: placement of a unit's replicas, their loads, and recent moves."""

from __future__ import annotations

from nicegui import ui

from hadal.apps.console import figures
from hadal.apps.console.feed import Watcher
from hadal.apps.console.overview_panel import unit_names
from hadal.apps.console.series import Series
from hadal.apps.console.widgets import HeatMap, Picker, nothing_of
from hadal.core.overview import LayerMove
from hadal.gateway.desk.frames import ConsoleFrame


class ExpertsPanel:
    """Panel with the placement of a unit's experts, their loads and moves."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        with ui.element("div").classes("h-row-of"):
            self._units = Picker(self._watch)
        self._nothing = ui.html("", sanitize=False)
        self._body = ui.element("div").classes("h-stack")
        with self._body:
            self._ranks = HeatMap(
                "Load of each rank, layer by layer",
                "Recent tokens of each rank's experts. In an uneven row, ranks wait for"
                " the busiest one.",
                "a rank",
                2.0,
            )
            self._experts = HeatMap(
                "Load of each expert",
                "Load before it is divided among replicas: the busiest experts have"
                " replicas on several ranks.",
                "an expert",
                4.0,
            )
            with ui.element("section").classes("h-panel"):
                ui.html("<h2>Moves</h2>")
                ui.label(
                    "A layer's experts move if that saves more time than it costs."
                    " Balance compares both placements with the current load."
                ).classes("h-note")
                self._moves = Picker(lambda name: self._show_move())
                self._move = ui.html("", sanitize=False)
        self._last: dict[str, LayerMove] = {}

    def _watch(self, unit: str) -> None:
        self._watcher.experts = {unit} if unit else set()

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Update the panel."""
        overview = frame.overview
        if overview is None:
            return
        wide = unit_names(overview, frame.status, min_ranks=2)
        self._units.offer(wide)
        self._watch(self._units.chosen)
        self._body.set_visibility(bool(wide))
        if not wide:
            self._nothing.set_content(
                figures.empty(
                    "Each unit has one rank",
                    "That rank has all experts, so there is nothing to place. With more ranks,"
                    " such as ranks = 4 in the deployment's [decode] table, this page shows the"
                    " placement of the experts.",
                )
            )
            return
        found = overview.experts.get(self._units.chosen)
        self._body.set_visibility(found is not None)
        if found is None:
            self._nothing.set_content(
                nothing_of(self._units.chosen, frame, "Waiting for its report.")
            )
            return
        self._nothing.set_content("")
        self._ranks.show(found.rank_loads)
        self._experts.show(found.expert_loads)
        self._last = {str(move.number): move for move in reversed(found.moves)}
        self._moves.offer(
            list(self._last),
            [f"layer {move.layer}, step {move.step_id:,}" for move in self._last.values()],
        )
        self._show_move()

    def _show_move(self) -> None:
        move = self._last.get(self._moves.chosen)
        if move is None:
            self._move.set_content(
                figures.empty(
                    "No expert has moved yet",
                    "Experts move after enough tokens were counted and the load of ranks"
                    " is uneven.",
                )
            )
            return
        self._move.set_content(
            figures.facts(
                (
                    ("Balance before", f"{move.balance_before:.3f}", "with the old placement"),
                    ("Balance after", f"{move.balance_after:.3f}", "with the new placement"),
                    ("Replicas moved", str(move.num_moved), f"in layer {move.layer}"),
                )
            )
            + figures.placement(move.before, move.after)
        )

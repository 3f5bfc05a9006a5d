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
                "Tokens that its experts got lately. Where a row is uneven, ranks wait for the warmest.",
                "a rank",
                2.0,
            )
            self._experts = HeatMap(
                "Load of each expert",
                "Before it is shared out: the busiest have copies on several ranks.",
                "an expert",
                4.0,
            )
            with ui.element("section").classes("h-panel"):
                ui.html("<h2>Moves</h2>")
                ui.label(
                    "A layer is placed anew where that saves more time than it takes."
                    " Balance is what both placements would make of the tokens of now."
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
                    "Each unit is one rank here",
                    "It holds all experts, so there is nothing to place. With ranks = 4 in the"
                    " deployment's [decode] table they are spread, and this page shows how.",
                )
            )
            return
        found = overview.experts.get(self._units.chosen)
        self._body.set_visibility(found is not None)
        if found is None:
            self._nothing.set_content(nothing_of(self._units.chosen, frame, "It is asked."))
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
                    "Nothing has been moved yet",
                    "Moves come when enough tokens were counted and some ranks had more than others.",
                )
            )
            return
        self._move.set_content(
            figures.facts(
                (
                    ("Balance before", f"{move.balance_before:.3f}", "as the experts lay"),
                    ("after", f"{move.balance_after:.3f}", "as they lie now"),
                    ("Copies moved", str(move.num_moved), f"in layer {move.layer}"),
                )
            )
            + figures.placement(move.before, move.after)
        )

"""Console panel of steps: one traced step of a unit, by op and rank."""

from __future__ import annotations

from nicegui import ui

from hadal.apps.console import figures
from hadal.apps.console.feed import Watcher
from hadal.apps.console.overview_panel import unit_names
from hadal.apps.console.series import Series
from hadal.apps.console.widgets import Picker, nothing_of
from hadal.gateway.desk.frames import ConsoleFrame
from hadal.gateway.desk.trace import TraceReply
from hadal.overlap.trace import covered_share, duration_s, shares


class StepsPanel:
    """Panel with one traced step of a unit: ops by rank, and the share of communication hidden."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        with ui.element("div").classes("h-row-of"):
            self._units = Picker(self._watch)
            self._ranks = Picker(lambda rank: self._draw())
        self._facts = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>One step</h2>")
            ui.label(
                "A step's tokens are split into two micro-batches: while one is in"
                " transfer to its experts, the other is computed. Waits shown below"
                " were not overlapped."
            ).classes("h-note")
            ui.html(
                '<div class="h-legend"><i class="h-k0"></i>micro-batch 1<i'
                ' class="h-k1"></i>micro-batch 2<i class="h-kw"></i>waits</div>'
            )
            self._whole = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>One layer of the step</h2>")
            self._layer = ui.html("", sanitize=False)
        self._trace: TraceReply | None = None

    def _watch(self, unit: str) -> None:
        self._watcher.traced = {unit} if unit else set()
        if self._trace is not None and self._trace.unit != unit:
            self._trace = None

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Update the panel."""
        if frame.overview is None:
            return
        self._units.offer(unit_names(frame.overview, frame.status))
        unit = self._units.chosen
        self._watch(unit)
        trace = frame.traces.get(unit)
        if trace is not None and trace.steps and trace.steps[-1].events:
            self._trace = trace
        if self._trace is None:
            self._facts.set_content("")
            self._layer.set_content("")
            self._whole.set_content(
                nothing_of(
                    unit,
                    frame,
                    "A unit steps only while it has requests. Send one, and the next step"
                    " is shown here.",
                )
            )
        self._draw()

    def _draw(self) -> None:
        if self._trace is None:
            return
        step = self._trace.steps[-1]
        found = {str(share.rank): share for share in shares(step.events)}
        self._ranks.offer(list(found), [f"rank {rank}" for rank in found])
        rank = int(self._ranks.chosen)
        covered = covered_share(step.events)
        exposed_s = sum(share.exposed_s for share in found.values()) / len(found)
        self._facts.set_content(
            figures.facts(
                (
                    ("Step", f"{step.step_id:,}", step.schedule),
                    (
                        "Took",
                        figures.milliseconds(duration_s(step.events) * 1e3),
                        "first to last op",
                    ),
                    (
                        "Tokens",
                        f"{step.num_tokens:,}",
                        f"in {step.num_micro_batches} micro-batch(es)",
                    ),
                    (
                        "Hidden",
                        figures.percent(100 * covered if covered is not None else None),
                        "of transfer time is overlapped" if covered is not None else "no transfers",
                    ),
                    ("Waited", figures.milliseconds(exposed_s * 1e3), "mean over ranks"),
                )
            )
        )
        mine = [event for event in step.events if event.rank == rank]
        begin_s = min(event.start_s for event in mine)
        self._whole.set_content(
            figures.timeline(mine, rank, begin_s, max(event.end_s for event in mine))
        )
        layers = sorted({event.layer for event in mine if event.lane == "link"}) or sorted(
            {event.layer for event in mine}
        )
        of_layer = [event for event in mine if event.layer == layers[len(layers) // 2]]
        self._layer.set_content(
            figures.timeline(
                mine,
                rank,
                min(event.start_s for event in of_layer),
                max(event.end_s for event in of_layer),
            )
        )

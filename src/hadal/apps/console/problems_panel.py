"""Console panel of problems: missing or restarted processes, and the last warnings."""

from __future__ import annotations

from nicegui import ui

from hadal.apps.console import charts, figures
from hadal.apps.console.series import Series
from hadal.apps.console.widgets import table_or_note
from hadal.gateway.desk.frames import ConsoleFrame
from hadal.runtime.process.child import ProcessPhase
from hadal.runtime.process.status import wrong_nodes
from hadal.runtime.topology import CONSOLE


class ProblemsPanel:
    """Panel with current problems, ended processes, and the last warnings and errors."""

    def __init__(self) -> None:
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Now</h2>")
            self._now = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Ended processes</h2>")
            self._ends = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Warnings and errors</h2>")
            self._lines = ui.html("", sanitize=False)

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Update the panel."""
        status = frame.status
        said = [frame.problem] if frame.problem else []
        if frame.overview is not None:
            said += [f"{name} is missing." for name in frame.overview.missing]
        if status is not None:
            said += wrong_nodes(status)
            said += [
                f"{name} is {process.phase}"
                + (f": {process.last_end}." if process.last_end else ".")
                for name, process in status.processes.items()
                if process.phase not in (ProcessPhase.READY, ProcessPhase.RESTING)
                and name != CONSOLE
            ]
        self._now.set_content(
            figures.table(("",), [(text,) for text in dict.fromkeys(said[:40])])
            if said
            else figures.empty(
                "No problems",
                "All wanted processes are ready."
                if status is not None
                else "The gateway reports nothing missing.",
            )
        )
        ends = [
            (
                charts.moment(end.unix_s, frame.unix_s),
                end.name,
                end.reason,
                "on request" if end.is_asked else "",
            )
            for end in reversed(status.ends if status is not None else ())
        ]
        self._ends.set_content(
            table_or_note(
                frame,
                ("time", "process", "how", ""),
                ends,
                "Nothing has ended",
                "A failed process is restarted and shown here.",
            )
        )
        lines = [
            (charts.moment_of(line.time, frame.unix_s), line.process, line.level.lower(), line.text)
            for line in reversed(frame.lines)
        ]
        self._lines.set_content(
            table_or_note(
                frame,
                ("time", "process", "", "what"),
                lines,
                "None",
                "This table shows warnings and errors; hadal logs shows all lines.",
            )
        )

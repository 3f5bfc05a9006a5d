"""Console panel of the latest requests: what of each prompt was cached, and why no more was.

Each page reads it with its own key, so the texts of prompts go only to the tenant that sent them.
"""

from __future__ import annotations

import time

import msgspec
from nicegui import ui

from hadal.apps.console import charts, figures
from hadal.apps.console.asking import AskError
from hadal.apps.console.feed import PERIOD_S, FrameSource
from hadal.apps.console.series import Series
from hadal.gateway.api.shapes import CacheExplanation, CacheReport
from hadal.gateway.desk.frames import ConsoleFrame

_MAX_ROWS = 100
_HEADS = (
    "time",
    "tenant",
    "request",
    "reason",
    "differs in",
    "text there",
    "before",
    "at",
    "found",
)
_NUM_WORDS = 7


class RequestsPanel:
    """Panel with a row for each prompt, the latest first."""

    def __init__(self, source: FrameSource, key: str) -> None:
        """`key`: the page's own."""
        self._source = source
        self._key = key
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Latest requests</h2>")
            ui.label(
                "Blocks of each prompt found in the cache, and why no more were. Texts are shown for"
                " requests of this page's key only."
            ).classes("h-note")
            self._rows = ui.html("", sanitize=False)
        ui.timer(PERIOD_S, self._read)

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Do nothing: the panel reads its own data."""

    async def _read(self) -> None:
        try:
            reports = await self._source.requests(self._key)
        except (AskError, msgspec.MsgspecError) as error:
            self._rows.set_content(figures.empty("No explanations", str(error)))
            return
        rows = [row for report in reports for row in rows_of(report, time.time())]
        self._rows.set_content(
            figures.table(_HEADS, rows[:_MAX_ROWS], _NUM_WORDS)
            if rows
            else figures.empty("No requests", "Requests appear here with their first token.")
        )


def rows_of(report: CacheReport, unix_s: float) -> list[tuple[str, ...]]:
    """Return the table's rows of one request, one for each of its prompts."""
    moment = charts.moment(report.unix_s, unix_s)
    return [(moment, report.tenant, report.id, *_cells(each)) for each in report.prompts]


def _cells(explanation: CacheExplanation) -> tuple[str, ...]:
    place = explanation.message
    return (
        explanation.reason,
        "" if place is None else place.name,
        explanation.text,
        explanation.kept_text,
        "" if explanation.position is None else f"{explanation.position}",
        f"{explanation.found_blocks} of {explanation.reusable_blocks}",
    )

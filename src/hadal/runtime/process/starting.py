"""The progress of a start: the number of ready processes, and the activities of the others.

At the first start it is a bar at the foot of the terminal, if there is a terminal. Otherwise, and
at restarts, it is a line of the log every 10 s. Changes no process.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import ExitStack

from hadal.progress import PERIOD_S, Bar
from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.process.logs import written_by

log = logging.getLogger(__name__)

_MOST_NAMED = 4
_OF_A_START = 0.9
"""Share of a process's start that is over when all its reported work is done."""


class Starting:
    """Display of the progress of the supervisor's children."""

    def __init__(self, children: Collection[Child], *, has_bar: bool) -> None:
        self._children = children
        self._stack = ExitStack()
        self._has_bar = has_bar
        self._bar: Bar | None = None
        self._logged_s: float | None = None
        """Time of the last log line, else of the first `look`; None while no process starts."""

    def look(self, now_s: float) -> None:
        """Show the progress of all starts. Called a few times per second."""
        starting = [child for child in self._children if child.phase is ProcessPhase.STARTING]
        if self._has_bar:
            if self._bar is None:
                self._bar = self._stack.enter_context(Bar("hadal serve", 1.0))
                self._stack.enter_context(written_by(self._bar.print_above))
            self._bar.update(self._text(starting), done=self._share())
        elif not starting:
            self._logged_s = None
        elif self._logged_s is None:
            self._logged_s = now_s
        elif now_s - self._logged_s >= PERIOD_S:
            self._logged_s = now_s
            log.info("%s", self._text(starting))

    def close(self) -> None:
        """Remove the bar; later starts are logged."""
        self._has_bar = False
        self._stack.close()

    def _text(self, starting: list[Child]) -> str:
        wanted = [child for child in self._children if child.is_wanted]
        num_ready = sum(child.phase is ProcessPhase.READY for child in wanted)
        named = [
            f"{child.name} {child.progress.doing or 'starts'}" for child in starting[:_MOST_NAMED]
        ]
        if len(starting) > _MOST_NAMED:
            named.append(f"{len(starting) - _MOST_NAMED} more start")
        return "; ".join([f"{num_ready} of {len(wanted)} processes are ready", *named])

    def _share(self) -> float:
        """Share of the whole start that is over."""
        shares = []
        for child in self._children:
            if child.is_wanted:
                of_reported = (
                    child.progress.doing.done / child.progress.doing.total
                    if child.progress.doing and child.progress.doing.total
                    else 0.0
                )
                shares.append(
                    1.0 if child.phase is ProcessPhase.READY else _OF_A_START * of_reported
                )
        return sum(shares) / len(shares) if shares else 1.0

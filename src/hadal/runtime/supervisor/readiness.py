"""Readiness of the run's processes, and its consequences: the run is announced, and may serve.

Shows the progress of starting processes. Sends no message itself, and starts nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hadal.runtime.process.child import ProcessPhase
from hadal.runtime.process.logs import about
from hadal.runtime.process.starting import Starting
from hadal.runtime.process.status import Status
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.draining import Draining
from hadal.runtime.supervisor.run_end import RunEnd
from hadal.runtime.supervisor.status import StatusWriter
from hadal.runtime.topology import CONSOLE, GATEWAY

log = logging.getLogger("hadal.supervisor")

_CONSOLE_S = 20.0
"""Seconds from the run's start to the console's latest start. The console starts when all other
processes are ready, so that it takes no processor from them, or after this time.
"""

Announce = Callable[[Status], None]
"""Callback, called once when all processes were started, and once when all are ready."""


class Readiness:
    """Progress of a run from its first start until everything is ready."""

    def __init__(
        self,
        children: Children,
        draining: Draining,
        status: StatusWriter,
        end: RunEnd,
        progress: Starting,
        announce: Announce,
        started_s: float,
    ) -> None:
        """`started_s`: time at which the run began."""
        self._children = children
        self._draining = draining
        self._status = status
        self._end = end
        self._progress = progress
        self._announce = announce
        self._was_started = False
        self._was_ready = False
        self._console = children.by_name.get(CONSOLE)
        if self._console is not None:
            self._console.backoff.start_at(started_s + _CONSOLE_S)

    def ready(self, name: str) -> None:
        """Note that a process works, and act on it. Only a STARTING process becomes ready."""
        child = self._children.by_name.get(name)
        if child is None or child.phase is not ProcessPhase.STARTING:
            return
        child.is_ready(time.monotonic())
        log.info(
            "%s is ready after %.1f s",
            name,
            child.progress.ready_s - child.progress.started_s,
            extra=about(name),
        )
        if name == GATEWAY and self._end.is_draining:
            self._draining.drain_front()
        self._children.note_served()
        if self._children.is_ready() and not self._was_ready:
            self._was_ready = True
            if self._console is not None:
                self._console.backoff.start_by(time.monotonic())
            self._progress.close()
            self._announce(self._status.status())
        self._status.write()

    def unit_works(self, unit: str) -> None:
        """Note that the front finds a unit working: adopted processes do not report readiness."""
        plan = self._children.plans.get(unit)
        for name in (unit, *plan.ready_after) if plan is not None else ():
            if self._children.by_name[name].is_adopted:
                self.ready(name)

    def announce_start_if_due(self) -> None:
        """Announce the run when all processes were started; the console may start later."""
        if not self._was_started and all(
            child.phase is not ProcessPhase.WAITING or child.role == CONSOLE
            for child in self._children.all
        ):
            self._was_started = True
            self._announce(self._status.status())

    def look(self) -> None:
        """Show the progress of starting processes."""
        self._progress.look(time.monotonic())

    def close(self) -> None:
        """End the display of progress."""
        self._progress.close()

"""status.json of a run, assembled from its parts and written at every change.

Owns only data for display: the last ends of processes and the last rollout. Decides nothing.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping

from hadal.runtime.process.status import ProcessEnd, RolloutStatus, Status
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.options import Listeners
from hadal.runtime.supervisor.run_end import RunEnd
from hadal.runtime.supervisor.run_files import RunFiles

_NUM_ENDS = 50
"""Number of the last ends of processes that are shown."""


class StatusWriter:
    """Writer of the run's state for operators."""

    def __init__(
        self,
        files: RunFiles,
        children: Children,
        end: RunEnd,
        listeners: Listeners,
        versions: Mapping[str, str],
        started_s: float,
    ) -> None:
        self._files = files
        self._children = children
        self._end = end
        self._listeners = listeners
        self._versions = dict(versions)
        self._started_s = started_s
        self._ends: deque[ProcessEnd] = deque(maxlen=_NUM_ENDS)
        self._rollout: RolloutStatus | None = None

    def note_end(self, end: ProcessEnd) -> None:
        """Add the end of a process to the next status."""
        self._ends.append(end)

    def show_rollout(self, rollout: RolloutStatus) -> None:
        """Write the progress of the last rollout."""
        self._rollout = rollout
        self.write()

    def status(self) -> Status:
        """Return the present status of the run."""
        nodes = self._children.nodes
        return Status(
            url=self._listeners.url,
            run_id=self._files.run.run_id,
            supervisor_pid=os.getpid(),
            ready=self._children.is_ready(),
            draining=self._end.is_draining,
            elapsed_s=time.monotonic() - self._started_s,
            processes=self._children.status(),
            nodes=nodes.status() if nodes else (),
            nodes_wrong=nodes.wrong if nodes else "",
            versions=self._versions,
            rollout=self._rollout,
            console_url=self._listeners.pages_url,
            ends=tuple(self._ends),
        )

    def write(self) -> None:
        """Write status.json."""
        self._files.write_status(self.status)

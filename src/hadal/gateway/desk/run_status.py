"""Supervisor's status.json, as read by a gateway: starts and cores of processes, problems of nodes.

Without a run folder the status is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hadal.runtime.process.status import Status, read_status, wrong_nodes


class RunStatus:
    """Facts about the run's processes, read from the file at each call."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def _read(self) -> Status | None:
        return read_status(self._folder) if self._folder is not None else None

    def wrong_nodes(self) -> Sequence[str]:
        """Return the problems of a cluster's nodes, a sentence each."""
        status = self._read()
        return wrong_nodes(status) if status is not None else ()

    def starts(self) -> Mapping[str, int]:
        """Return the number of starts of each process."""
        status = self._read()
        if status is None:
            return {}
        return {name: process.num_starts for name, process in status.processes.items()}

    def cores(self) -> Mapping[str, Sequence[int]]:
        """Return the CPU cores of each process that is bound to some (Overview.cores)."""
        status = self._read()
        if status is None:
            return {}
        return {name: process.cores for name, process in status.processes.items() if process.cores}

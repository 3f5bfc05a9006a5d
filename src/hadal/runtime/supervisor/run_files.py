"""The files of a run that its supervisor alone writes: run.json, status.json and fleet.json.

Owns the Run. Does not depend on the reasons for its changes, or on running processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from hadal.core.overview import FleetSeen
from hadal.runtime.process.process import Run, write_run
from hadal.runtime.process.status import Status, write_fleet, write_status

log = logging.getLogger("hadal.supervisor")


class RunFiles:
    """Files of one run folder. A full disk must not end a run that serves: it is logged once."""

    def __init__(self, folder: Path, run: Run) -> None:
        """Write run.json, which processes read at their start."""
        self.folder = folder
        self._run = run
        self._is_unwritten = False
        """True if the last write failed."""
        self._is_run_old = False
        """True if run.json still has the run as before the end of its last rollout."""
        write_run(folder, run)

    @property
    def run(self) -> Run:
        """Current run, as processes started from now on will read it."""
        return self._run

    def replace_run(self, run: Run) -> None:
        """Write another run.json immediately. Raises OSError; then the run is unchanged."""
        write_run(self.folder, run)
        self._run = run

    def change_run(self, run: Run) -> None:
        """Change the run. run.json is written with the next status; a failed write is repeated."""
        self._run = run
        self._is_run_old = True

    def write_status(self, make: Callable[[], Status]) -> None:
        """Write status.json, and run.json if it is old."""
        if self._is_run_old:
            self._is_run_old = not self._write(lambda: write_run(self.folder, self._run))
        self._write(lambda: write_status(self.folder, make()))

    def write_fleet(self, seen: FleetSeen) -> None:
        """Write fleet.json."""
        self._write(lambda: write_fleet(self.folder, seen))

    def _write(self, write: Callable[[], None]) -> bool:
        """Return True if the write succeeded. The first failure in a row is logged."""
        try:
            write()
        except OSError as error:
            if not self._is_unwritten:
                log.warning(
                    "the files in %s are out of date: writing them failed (%s)", self.folder, error
                )
            self._is_unwritten = True
        else:
            self._is_unwritten = False
        return not self._is_unwritten

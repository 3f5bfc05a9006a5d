"""What runs, as `status.json` in the run folder: for operators, scripts and tests. Written by the
supervisor alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

STATUS_FILE = "status.json"


@dataclass(frozen=True)
class ProcessStatus:
    """One child. `pid` 0: it does not run."""

    role: str
    phase: str
    pid: int
    num_starts: int


@dataclass(frozen=True)
class Status:
    """One run. `ready`: every process is."""

    url: str
    run_id: str
    supervisor_pid: int
    ready: bool
    draining: bool
    elapsed_s: float
    """Since the supervisor began."""
    processes: dict[str, ProcessStatus]


def write_status(folder: Path, status: Status) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    path = folder / f"{STATUS_FILE}.new"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
    path.rename(folder / STATUS_FILE)


def read_status(folder: Path) -> Status | None:
    """Return the last status written, None if there is none yet."""
    try:
        return msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=Status)
    except FileNotFoundError:
        return None

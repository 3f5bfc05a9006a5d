"""Recorder of the calls and answers of roles, if HADAL_RECORD names a folder; otherwise inactive.

Every process that hosts a role writes its own file, `PROCESS-PID.rec` (format: roles/recording),
call by call, so that `kill -9` loses at most the call it interrupts. A recording contains prompts
and answers, so only its owner may read it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hadal.core.config import Deployment
from hadal.core.documents import is_folder
from hadal.core.errors import ConfigError
from hadal.roles.recording import (
    VERSION,
    Call,
    Made,
    Opening,
    RecordedRole,
    Recording,
    RecordingError,
    frame,
    parse,
)
from hadal.runtime.process.private import open_private

log = logging.getLogger(__name__)

RECORD = "HADAL_RECORD"
"""Environment variable with the folder for recordings. Empty or unset: no recordings."""
SUFFIX = ".rec"


def recorded(
    role: RecordedRole, process: str, made: Made, run_id: str, deployment: Deployment
) -> RecordedRole:
    """Return the object that a host calls as its role: a Recorded if recordings are wanted, else
    `role`.

    `process`: name of the role's process on the wire. Raises ConfigError if the folder is not
    writable.
    """
    folder = os.environ.get(RECORD, "")
    if not folder:
        return role
    # Databases' URLs may contain passwords, and no role needs them.
    deployment = msgspec.structs.replace(
        deployment,
        ledger=msgspec.structs.replace(deployment.ledger, url=""),
        batches=msgspec.structs.replace(deployment.batches, url=""),
    )
    tape = Tape(partial(_append, _open(Path(folder), process)))
    tape.write(Opening(VERSION, run_id, process, made, deployment))
    log.info("recording into %s", folder)
    return Recorded(role, tape)


class Recorded:
    """Wrapper of a role that records its calls. Queries without effect go to the role directly."""

    def __init__(self, role: RecordedRole, tape: Tape) -> None:
        self._role = role
        self._tape = tape

    def start(self, now_s: float) -> list[Any]:
        """Return the role's first effects."""
        return self._tape.note(self._role.start, now_s)

    def handle(self, now_s: float, *events: Any) -> list[Any]:
        """Return the role's answer to these events."""
        return self._tape.note(self._role.handle, now_s, *events)


class Tape:
    """File of recordings of one process. A write error ends the recording, not the process."""

    def __init__(self, append: Callable[[bytes], object]) -> None:
        """`append` adds bytes at the file's end."""
        self._append: Callable[[bytes], object] | None = append

    def note(self, call: Callable[..., list[Any]], now_s: float, *events: Any) -> list[Any]:
        """Return the answer of `call(now_s, *events)`; record both. Record and raise exceptions."""
        try:
            effects = call(now_s, *events)
        except Exception as error:
            self.write(Call(now_s, events, (), f"{type(error).__name__}: {error}"))
            raise
        self.write(Call(now_s, events, tuple(effects)))
        return effects

    def write(self, entry: Opening | Call) -> None:
        """Append one entry and hand it to the kernel."""
        if self._append is None:
            return
        try:
            self._append(frame(entry))
        except OSError as error:
            log.warning("the recording is incomplete: it cannot be written any further: %s", error)
            self._append = None


def _append(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _open(folder: Path, process: str) -> int:
    """Create the file and return its descriptor, which stays open until the process ends."""
    path = folder / f"{process}-{os.getpid()}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return open_private(path, os.O_WRONLY | os.O_EXCL)
    except FileExistsError:
        raise ConfigError(f"{path} exists already: set {RECORD} to an empty folder.") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error}): set {RECORD} to another folder."
        ) from error


def read_recordings(folder: Path) -> list[Recording]:
    """Read all recordings of one run, ordered by process and time. Raises RecordingError naming the
    file and the problem.
    """
    recordings = []
    for path in sorted(folder.glob(f"*{SUFFIX}")) if is_folder(folder) else ():
        try:
            recordings.append(parse(path.read_bytes()))
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error}") from error
        except RecordingError as error:
            raise RecordingError(f"{path}: {error}") from error
    if not recordings:
        raise RecordingError(f"{folder} has no {SUFFIX} files: serve with {RECORD}={folder} first.")
    if len({recording.opening.run_id for recording in recordings}) > 1:
        raise RecordingError(
            f"{folder} holds recordings of several runs: give each a folder of its own."
        )
    return sorted(recordings, key=lambda r: (r.process, r.calls[0].now_s if r.calls else 0.0))

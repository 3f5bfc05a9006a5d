"""The files of the model that a process has mapped: whether they are those that the server was started
with, and whether they stay as they are.

A page of a file that became shorter cannot be read: the kernel kills whoever tries (SIGBUS, which
the supervisor says in plain words). One that was written over is another weight. So a process that
maps the files looks at them every second, and ends with a clear word where they changed; it is
started again, and works when they are whole.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hadal.core.errors import EXIT_CONFIG, CheckpointError
from hadal.runtime.fingerprint import digest_of_model
from hadal.runtime.process.process import Run

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks: a handful of stat calls."""

_State = dict[str, tuple[int, int, int]]
"""File name -> size, time of its last change, inode."""


def check_model(run: Run) -> None:
    """Raise CheckpointError where the model's files hold something else than when the server was
    started: another process may compute with what they were.
    """
    if run.model_digest and digest_of_model(Path(run.deployment.model)) != run.model_digest:
        raise CheckpointError(
            f"{run.deployment.model}: the model's files are not those that this server was started"
            " with. Put those back, or start the server again."
        )


def end_process(reason: str) -> None:
    """End the process at once, with the reason in the log: to read a page that is gone would kill it
    without a message.
    """
    log.error("%s", reason)
    logging.shutdown()
    os._exit(EXIT_CONFIG)


def watch_model(folder: Path, end: Callable[[str], None] = end_process) -> None:
    """Look at the files from now on, in a thread of its own; call `end` once when they changed."""
    seen = _state(folder)

    def look() -> None:
        while True:
            time.sleep(LOOK_S)
            now = _state(folder)
            if now != seen:
                names = sorted(name for name in seen | now if seen.get(name) != now.get(name))
                return end(f"{folder}: {', '.join(names[:4])} changed while it was in use.")

    threading.Thread(target=look, name="model-files", daemon=True).start()


def _state(folder: Path) -> _State:
    found: _State = {}
    for path in folder.glob("*.safetensors"):
        try:
            status = path.stat()
        except OSError:
            continue  # It went between the two calls; the next look says so.
        found[path.name] = status.st_size, status.st_mtime_ns, status.st_ino
    return found

"""Checks that a model's mapped files are those of the start or last rollout, and do not change.

Reading a page beyond the end of a shortened file kills the process with SIGBUS (which the
supervisor explains). An overwritten page silently holds other weights. So a process that maps the
files checks them every second, and ends with a clear message if they changed. It is started again,
and works once the files are restored.
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
"""Time between two checks, a few stat calls each."""

_State = dict[str, tuple[int, int, int]]
"""File name -> size in bytes, time of the last change in ns, inode number."""


def check_model(run: Run) -> None:
    """Raise CheckpointError if the model's files differ from those of the server's start or last
    rollout: another process may still use the old contents.
    """
    if run.model_digest and digest_of_model(Path(run.deployment.model)) != run.model_digest:
        raise CheckpointError(
            f"{run.deployment.model}: the model's files have changed since this server was started."
            " Put the old ones back, or restart the server."
        )


def end_process(reason: str) -> None:
    """Log the reason and end the process now: reading a missing page would kill it silently."""
    log.error("%s", reason)
    logging.shutdown()
    os._exit(EXIT_CONFIG)


def watch_model(folder: Path, end: Callable[[str], None] = end_process) -> None:
    """Check the files from now on, in a separate thread; call `end` once if they changed."""
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
            continue  # The file vanished between the two calls; it is missing in the result.
        found[path.name] = status.st_size, status.st_mtime_ns, status.st_ino
    return found

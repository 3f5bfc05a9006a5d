"""Troubles with the folder of the disk cache, counted by kind. Each kind makes one line in the log
of a process, for all threads and operations, and is logged again only after REPEAT_S.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path

log = logging.getLogger("hadal.disk")

REPEAT_S = 600.0
GONE = "gone"
_logged_lock = threading.Lock()
_logged: dict[tuple[Path, str], float] = {}
"""(folder, kind) -> time of its last log line. There is one dictionary per process, because its
store and its view have the same troubles.
"""


class Troubles:
    """Troubles of one store or view. Called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.kind_to_count: Counter[str] = Counter()
        self._folder = folder
        self._lock = threading.Lock()

    def note(self, kind: str, text: str) -> None:
        """Count a trouble, and log it unless one of its kind was logged lately."""
        now_s, key = time.monotonic(), (self._folder, kind)
        with self._lock:
            self.kind_to_count[kind] += 1
        with _logged_lock:
            is_new = now_s - _logged.get(key, -REPEAT_S) >= REPEAT_S
            if is_new:
                _logged[key] = now_s
        if is_new:
            log.warning("disk cache: %s", text)

    def note_gone(self) -> None:
        """Note that the folder is missing."""
        self.note(
            GONE,
            f"the folder {self._folder} is gone: its KV is computed again, and the folder is created"
            " again when there is a block to store",
        )

    def note_error(self, what: str, error: Exception) -> str:
        """Note an exception, and return the error text for the answer. The kind depends on the
        cause, not on the operation.
        """
        number = error.errno if isinstance(error, OSError) else None
        if number in (None, errno.ENOENT) and not self._folder.exists():
            self.note_gone()
        elif number is not None:
            name = errno.errorcode.get(number, str(number))
            self.note(
                name,
                f"the folder {self._folder} fails ({os.strerror(number)}): KV that cannot be "
                "read is computed, and none is stored until the folder works again",
            )
        else:
            self.note("segment", f"{error}; its KV is computed instead")
        return f"{what}: {error}"

    def note_useless(self, error: Exception) -> None:
        """Note a file that is not a whole segment, or never was one of ours; it is not removed."""
        text = (
            f"{error}; it takes up disk space and is not used: delete it, unless another version of"
            " Hadal uses it"
        )
        self.note("useless segment", text)

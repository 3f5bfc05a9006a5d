"""Troubles with the folder of the disk cache. They are counted by kind, and each kind is one line in
the log of a process, whichever of its threads met with it and at what, and is logged again only
after a long while.
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
"""(folder, kind) -> when it was logged. There is one of a process, for its store and its view meet
with the same trouble.
"""


class Troubles:
    """Troubles of one store or view. Called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.kind_to_count: Counter[str] = Counter()
        self._folder = folder
        self._lock = threading.Lock()

    def note(self, kind: str, text: str) -> None:
        """Count it, and tell the log if it has not heard of this kind lately."""
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
        """The folder is not there."""
        self.note(
            GONE,
            f"the folder {self._folder} is gone: what was in it is computed, and it is made again"
            " as soon as there is something to keep",
        )

    def note_error(self, what: str, error: Exception) -> str:
        """Note an exception; returns what to say to whoever asked. A cause is one kind, whatever it
        is met at.
        """
        number = error.errno if isinstance(error, OSError) else None
        if number in (None, errno.ENOENT) and not self._folder.exists():
            self.note_gone()
        elif number is not None:
            name = errno.errorcode.get(number, str(number))
            self.note(
                name,
                f"the folder {self._folder} fails ({os.strerror(number)}): what cannot be read is "
                "computed, and nothing is kept until it works again",
            )
        else:
            self.note("segment", f"{error}; what was in it is computed")
        return f"{what}: {error}"

    def note_useless(self, error: Exception) -> None:
        """Note a segment that is whole no more, or never was ours; it is not removed by us."""
        text = (
            f"{error}; it takes room and is not used: delete it, unless another version of Hadal"
            " has it"
        )
        self.note("useless segment", text)

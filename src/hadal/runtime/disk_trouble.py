"""Troubles with the folder of the disk cache: counted by kind, and each kind told in one line of
the log of a process, whichever of its threads met with it and at what, and again only after a long
while.
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
_told_lock = threading.Lock()
_told: dict[tuple[Path, str], float] = {}
"""(folder, kind) -> when the log was told. Of the process: its store and its view meet with the
same trouble.
"""


class Troubles:
    """Of one store or view. From any thread."""

    def __init__(self, folder: Path) -> None:
        self.kind_to_count: Counter[str] = Counter()
        self._folder = folder
        self._lock = threading.Lock()

    def note(self, kind: str, text: str) -> None:
        """Count it, and tell the log if it has not heard of this kind lately."""
        now_s, key = time.monotonic(), (self._folder, kind)
        with self._lock:
            self.kind_to_count[kind] += 1
        with _told_lock:
            is_new = now_s - _told.get(key, -REPEAT_S) >= REPEAT_S
            if is_new:
                _told[key] = now_s
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
        """The same of an exception; returns what to tell whoever asked. A cause is one kind, at
        whatever it is met.
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
        """The same of a segment that is whole no more, or never was one of ours: nobody of us
        deletes it.
        """
        text = (
            f"{error}; it takes room and is not used: delete it, unless another version of Hadal"
            " has it"
        )
        self.note("useless segment", text)

"""Troubles with a disk: counted by kind, and each kind told in one line of the log, again only after a long while."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter

log = logging.getLogger("hadal.disk")

REPEAT_S = 600.0


class Troubles:
    """Of one store or view. From any thread."""

    def __init__(self) -> None:
        self.kind_to_count: Counter[str] = Counter()
        self._kind_to_told_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, kind: str, text: str) -> None:
        """Count it, and tell the log if it has not heard of this kind lately."""
        now_s = time.monotonic()
        with self._lock:
            self.kind_to_count[kind] += 1
            is_new = now_s - self._kind_to_told_s.get(kind, -REPEAT_S) >= REPEAT_S
            if is_new:
                self._kind_to_told_s[kind] = now_s
        if is_new:
            log.warning("disk cache: %s", text)

    def note_error(self, what: str, error: Exception) -> str:
        """The same of an exception; returns what to tell whoever asked."""
        name = type(error).__name__
        if isinstance(error, OSError) and error.errno is not None:
            name = errno.errorcode.get(error.errno, str(error.errno))
        text = f"{what}: {error}"
        self.note(f"{what}: {name}", f"{text}; the cache misses until it is better")
        return text

    def note_useless(self, error: Exception) -> None:
        """The same of a segment that is whole no more, or never was one of ours: nobody of us deletes it."""
        text = f"{error}; it takes room and is not used: delete it, unless another version of Hadal has it"
        self.note("useless segment", text)

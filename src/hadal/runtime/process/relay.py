"""Relay of a process's output: to its log file or the supervisor's stderr, and to the lines that
are kept for `hadal logs`.

A line that reports the progress of a start goes to `on_doing` instead. Independent of processes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hadal.runtime.process.forks import Output
from hadal.runtime.process.logs import TEXT, Doing, KeptLines, as_line, doing_of, write_line
from hadal.runtime.process.private import append_private

log = logging.getLogger(__name__)


class OutputRelay:
    """Copier of the output of successive processes with the same name."""

    def __init__(
        self,
        name: str,
        log_path: Path | None,
        log_format: str = TEXT,
        kept: KeptLines | None = None,
    ) -> None:
        """`log_path`: None for the supervisor's stderr. `kept`: receives all lines as well."""
        self._name = name
        self._log_path = log_path
        self._log_format = log_format
        self._kept = kept

    def start(self, output: Output, on_doing: Callable[[Doing], None]) -> None:
        """Copy a process's output, in a thread: a slow terminal must never stop the supervisor."""
        threading.Thread(
            target=self._copy, args=(output, on_doing), name=f"log-{self._name}", daemon=True
        ).start()

    def _copy(self, output: Output, on_doing: Callable[[Doing], None]) -> None:
        file = None
        if self._log_path is not None:
            try:
                file = append_private(self._log_path)
            except OSError as error:
                # The output is read nevertheless: a process blocks if its output is not read.
                log.warning(
                    "%s: the output of %s cannot be written there, and goes to stderr (%s)",
                    self._log_path,
                    self._name,
                    error,
                )
        with output as lines, file or contextlib.nullcontext():
            for line in lines:
                if (doing := doing_of(line)) is not None:
                    on_doing(doing)
                    continue
                whole = as_line(self._name, self._log_format, line, time.time())
                if self._kept is not None:
                    self._kept.write(whole)
                if file is None:
                    write_line(whole)
                    continue
                with contextlib.suppress(OSError):  # The disk is full: the child goes on.
                    file.write(whole)
        if self._kept is not None:
            self._kept.close()

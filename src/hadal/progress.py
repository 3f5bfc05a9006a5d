"""Progress display: a bar at the foot of a terminal, elsewhere a line every 10 s.

Written to stderr, so that programs can read a command's stdout. Independent of the work.
"""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

PERIOD_S = 10.0
"""Seconds between two lines if stderr is no terminal."""


class Bar:
    """Context manager with the progress display of one piece of work. `update` may be called from
    any thread.
    """

    def __init__(
        self,
        name: str,
        total: float | None = None,
        *,
        console: Console | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        """`total`: progress at the end; None: unknown. `console`: used instead of stderr."""
        self.console = console or Console(stderr=True)
        self._name = name
        self._total = total
        self._what = ""
        self._done = 0.0
        self._period_s = period_s
        self._start_s = time.monotonic()
        self._end = threading.Event()
        self._teller: threading.Thread | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=total)

    def __enter__(self) -> Bar:
        self._start_s = time.monotonic()
        self._bar.start()
        if not self.console.is_terminal:
            self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)
            self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._bar.stop()
        if self._teller is not None:
            self._teller.join()

    def update(self, what: str = "", *, done: float | None = None, advance: float = 0.0) -> None:
        """Show activity `what` ("": as before), progress `done` (None: as before) + `advance`."""
        self._what = what or self._what
        self._done = (self._done if done is None else done) + advance
        self._bar.update(self._task, description=self._what or self._name, completed=self._done)

    def print_above(self, line: bytes) -> None:
        """Print a line of other output above the bar, without breaking the bar."""
        self.console.print(Text(line.decode("utf-8", "replace").rstrip("\n")), soft_wrap=True)

    def _tell(self) -> None:
        while not self._end.wait(self._period_s):
            self.console.print(Text(self._line()), soft_wrap=True)

    def _line(self) -> str:
        parts = [self._what] if self._what else []
        if self._total:
            parts.append(f"{min(1.0, self._done / self._total):.0%}")
        return (
            f"{self._name}:"
            f" {', '.join([*parts, f'{time.monotonic() - self._start_s:.0f} s so far'])}"
        )

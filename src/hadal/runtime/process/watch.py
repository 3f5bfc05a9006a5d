"""The supervisor's failure detector for processes that report periodically: it finds frozen ones.

The supervisor runs on their host, so it reads /proc itself to see if a suspected process could run.
Only Linux has that data. Does not depend on any message but Sighting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from hadal.core.messages.units import Sighting
from hadal.roles.suspects import Absence, Suspects

_PROC = Path("/proc")
_STOPPED = ("T", "t")


@dataclass(frozen=True)
class ProcessState:
    """Scheduling of one process. Seconds count from its start, summed over its present threads."""

    waited_s: float
    """Time in which threads were ready to run and had no processor (proc(5), schedstat)."""
    is_stopped: bool


def look_at(pid: int) -> ProcessState:
    """Read a process's state from /proc. One that is gone has waited 0 s and is not stopped."""
    waited_ns = 0
    try:
        is_stopped = _kernel_state(_PROC / str(pid) / "stat") in _STOPPED
        for thread in os.scandir(_PROC / str(pid) / "task"):
            waited_ns += _waited_ns(Path(thread.path) / "schedstat")
    except OSError:
        return ProcessState(0.0, is_stopped=False)
    return ProcessState(waited_ns / 1e9, is_stopped)


def _kernel_state(path: Path) -> str:
    """Return the state letter after the bracketed command, which may hold any character."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]


def _waited_ns(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii").split()[1])
    except (
        OSError,
        IndexError,
        ValueError,
    ):  # The thread has ended, or this kernel does not count it.
        return 0


class Watch:
    """Detector of frozen processes. Times are in seconds of any clock that the caller chooses."""

    def __init__(
        self, timeout_s: float, period_s: float, state_of: Callable[[str], ProcessState]
    ) -> None:
        """`timeout_s`: longest silence of a process, counted over time in which it could run.
        `period_s`: longest time between two calls of `frozen`, unless this process itself stands
        still. `state_of`: returns a process's state by its name.
        """
        self._absence = Absence(period_s)
        self._state_of = state_of
        self._suspects = Suspects(timeout_s)
        self._name_to_heard_s: dict[str, float] = {}

    def note_alive(self, now_s: float, name: str) -> None:
        """Note that the process of this name has reported."""
        self._name_to_heard_s[name] = now_s

    def frozen(self, now_s: float, names: Collection[str]) -> list[str]:
        """Return the frozen processes among `names`; each must have reported at least once. Call it
        after all received reports were noted.
        """
        missed_s = self._absence.called(now_s)
        for name, heard_s in self._name_to_heard_s.items():
            self._name_to_heard_s[name] = min(now_s, heard_s + missed_s)
        frozen = self._suspects.judge(
            now_s, {name: now_s - self._name_to_heard_s[name] for name in names}
        )
        for name in self._suspects.to_ask(now_s):
            state = self._state_of(name)
            self._suspects.sighted(now_s, Sighting(name, state.waited_s, state.is_stopped))
        return frozen

    def why(self, name: str) -> str:
        """Return the observations of a frozen process as text for the log; may be empty."""
        return self._suspects.why(name)

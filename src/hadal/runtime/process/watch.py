"""The supervisor's watch over processes that report again and again that they work: which of them
are frozen?

It is the judge and the host in one, so it looks itself, in /proc, at what it suspects: whether the
process could run. Elsewhere than on Linux nothing is seen. Knows a Sighting, and no other message.
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
    """Scheduling of one process. Seconds count from its start, over all threads that it has now."""

    waited_s: float
    """A thread was ready to run and had no processor (proc(5), schedstat)."""
    is_stopped: bool


def look_at(pid: int) -> ProcessState:
    """See how a process fares. One that is gone has waited for nothing."""
    waited_ns = 0
    try:
        is_stopped = _kernel_state(_PROC / str(pid) / "stat") in _STOPPED
        for thread in os.scandir(_PROC / str(pid) / "task"):
            waited_ns += _waited_ns(Path(thread.path) / "schedstat")
    except OSError:
        return ProcessState(0.0, is_stopped=False)
    return ProcessState(waited_ns / 1e9, is_stopped)


def _kernel_state(path: Path) -> str:
    """The letter behind the command, which stands in brackets and may hold any character."""
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
    """Times are of whatever clock the caller reads, in seconds."""

    def __init__(
        self, timeout_s: float, period_s: float, state_of: Callable[[str], ProcessState]
    ) -> None:
        """A process may be silent for `timeout_s` in which it could run; `frozen` is called every
        `period_s` at least, unless this process stands still itself. `state_of`: how one fares, by
        its name.
        """
        self._absence = Absence(period_s)
        self._state_of = state_of
        self._suspects = Suspects(timeout_s)
        self._name_to_heard_s: dict[str, float] = {}

    def heard(self, now_s: float, name: str) -> None:
        """The process of this name spoke."""
        self._name_to_heard_s[name] = now_s

    def frozen(self, now_s: float, names: Collection[str]) -> list[str]:
        """Which of these, each heard once at least, are frozen. To be called after all that they
        said was heard.
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
        """What was seen of one that is frozen, for the log; empty if nothing is to be said."""
        return self._suspects.why(name)

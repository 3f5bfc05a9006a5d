"""Failure detector: suspected processes, and what their host observes of them. The front watches
units with it, a leader its ranks, and the supervisor gateways and console.

    a process is silent for ASK_SHARE of its timeout: detector --Suspect--> supervisor
    the supervisor observes the process on its host:  supervisor --Sighting--> detector

policy/suspicion decides whether the process is frozen or only lacks a processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hadal.core.messages.units import Sighting
from hadal.policy.suspicion import ASK_SHARE, Silence, are_all_late, is_frozen, pause_s

_ASK_AGAIN_S = 0.1


class Absence:
    """Time during which the failure detector did not run; not counted as silence of processes."""

    def __init__(self, period_s: float) -> None:
        """`period_s`: longest interval between calls of the detector, seconds."""
        self._period_s = period_s
        self._called_s = math.inf

    def called(self, now_s: float) -> float:
        """Note a call; return for how many seconds the detector did not run before it, or 0."""
        gap_s, self._called_s = now_s - self._called_s, now_s
        return pause_s(gap_s, self._period_s)


@dataclass(slots=True)
class _SeenProcess:
    """Observations of one process since it is suspected."""

    asked_s: float = -math.inf
    first: tuple[float, float] | None = None
    """(time, seconds waited for a processor so far) of the first observation."""
    starved: float | None = None
    is_stopped: bool = False


class Suspects:
    """Failure detector for several processes. `timeout_s`: longest silence allowed, counted over
    time in which the process could run.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._name_to_seen: dict[str, _SeenProcess] = {}

    def judge(self, now_s: float, name_to_silent_s: Mapping[str, float]) -> list[str]:
        """Check all watched processes by how long each is silent. Return the frozen ones."""
        is_together = are_all_late(name_to_silent_s.values(), self._timeout_s)
        late = [
            name
            for name, silent_s in name_to_silent_s.items()
            if silent_s > ASK_SHARE * self._timeout_s
        ]
        self._name_to_seen = {name: self._name_to_seen.get(name) or _SeenProcess() for name in late}
        return [
            name
            for name in late
            if is_frozen(
                self._silence(name, name_to_silent_s[name]),
                self._timeout_s,
                are_all_late=is_together,
            )
        ]

    def to_ask(self, now_s: float) -> list[str]:
        """Return suspected processes to ask the host about now, each at most every _ASK_AGAIN_S."""
        due = [
            name
            for name, seen in self._name_to_seen.items()
            if now_s - seen.asked_s >= _ASK_AGAIN_S
        ]
        for name in due:
            self._name_to_seen[name].asked_s = now_s
        return due

    def is_frozen(self, name: str, silent_s: float, timeout_s: float) -> bool:
        """Return whether a process is frozen, by another timeout than `judge` applies."""
        return is_frozen(self._silence(name, silent_s), timeout_s)

    def sighted(self, now_s: float, message: Sighting) -> None:
        """Apply a host's observation. It is ignored if the process is no longer suspected."""
        seen = self._name_to_seen.get(message.process)
        if seen is None:
            return
        seen.is_stopped = message.is_stopped
        if seen.first is None:
            seen.first = now_s, message.waited_s
        elif now_s > seen.first[0]:
            seen.starved = max(0.0, message.waited_s - seen.first[1]) / (now_s - seen.first[0])

    def why(self, name: str) -> str:
        """Return the host's observation for the log; empty before the second one."""
        seen = self._name_to_seen.get(name)
        if seen is None or seen.starved is None:
            return ""
        return (
            ", stopped"
            if seen.is_stopped
            else f", {min(seen.starved, 1.0):.0%} of it without a processor"
        )

    def _silence(self, name: str, silent_s: float) -> Silence:
        seen = self._name_to_seen.get(name) or _SeenProcess()
        return Silence(silent_s, seen.starved, seen.is_stopped)

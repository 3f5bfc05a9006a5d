"""Whom a judge suspects, and what their host saw of them since: the front watches units so, a
leader its ranks.

    silent for a part of the timeout: Suspect -> supervisor ... Sighting -> the judge: frozen, or
    only starved?

Whether to give one up is decided in policy/suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hadal.core.messages.units import Sighting
from hadal.policy.suspicion import ASK_SHARE, Silence, are_all_late, is_frozen, pause_s

_ASK_AGAIN_S = 0.1


class Absence:
    """When a judge stood still itself: what it did not hear then is nobody's silence."""

    def __init__(self, period_s: float) -> None:
        """The judge is called every `period_s` at least."""
        self._period_s = period_s
        self._called_s = math.inf

    def called(self, now_s: float) -> float:
        """The judge is called. Returns for how long it stood still before, 0 if it did not."""
        gap_s, self._called_s = now_s - self._called_s, now_s
        return pause_s(gap_s, self._period_s)


@dataclass(slots=True)
class _SeenProcess:
    """What is known of one process since it is suspected."""

    asked_s: float = -math.inf
    first: tuple[float, float] | None = None
    """When it was first looked at, and how long it had waited for a processor by then."""
    starved: float | None = None
    is_stopped: bool = False


class Suspects:
    """`timeout_s`: what a process may be silent for."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._name_to_seen: dict[str, _SeenProcess] = {}

    def judge(self, now_s: float, name_to_silent_s: Mapping[str, float]) -> list[str]:
        """Look at all who are watched, by how long they are silent. Returns those that are
        frozen.
        """
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
        """Name those whom `judge` suspects and whose host has to say now what it sees of them. Each
        is named again only after a while.
        """
        due = [
            name
            for name, seen in self._name_to_seen.items()
            if now_s - seen.asked_s >= _ASK_AGAIN_S
        ]
        for name in due:
            self._name_to_seen[name].asked_s = now_s
        return due

    def is_frozen(self, name: str, silent_s: float, timeout_s: float) -> bool:
        """Whether a process is frozen by another timeout than `judge`'s: others who lost it are
        believed sooner.
        """
        return is_frozen(self._silence(name, silent_s), timeout_s)

    def sighted(self, now_s: float, message: Sighting) -> None:
        """What the host sees of it. Of one that is not suspected any more it does not matter."""
        seen = self._name_to_seen.get(message.process)
        if seen is None:
            return
        seen.is_stopped = message.is_stopped
        if seen.first is None:
            seen.first = now_s, message.waited_s
        elif now_s > seen.first[0]:
            seen.starved = max(0.0, message.waited_s - seen.first[1]) / (now_s - seen.first[0])

    def why(self, name: str) -> str:
        """What the host saw, for the log; empty if nothing is to be said."""
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

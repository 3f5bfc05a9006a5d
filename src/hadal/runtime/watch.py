"""The supervisor's watch over processes that tell it again and again that they work: which of them
are frozen?

It is the judge and the host in one: what it suspects it looks at itself (runtime/sight). Knows no
messages of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hadal.core.messages import Sighting, Suspect
from hadal.roles.suspects import Absence, Suspects
from hadal.runtime.sight import Sight, look_at


class Watch:
    """Times are of whatever clock the caller reads, in seconds."""

    def __init__(
        self, timeout_s: float, period_s: float, look_at: Callable[[int], Sight] = look_at
    ) -> None:
        """A process may be silent for `timeout_s` in which it could run; `frozen` is called every
        `period_s` at least, unless this process stands still itself.
        """
        self._absence = Absence(period_s)
        self._look_at = look_at
        self._suspects = Suspects(timeout_s)
        self._name_to_heard_s: dict[str, float] = {}

    def heard(self, now_s: float, name: str) -> None:
        """The process of this name spoke."""
        self._name_to_heard_s[name] = now_s

    def frozen(self, now_s: float, name_to_pid: Mapping[str, int]) -> list[str]:
        """Which of these, each heard once at least, are frozen. To be called after all that they
        said was heard.
        """
        missed_s = self._absence.called(now_s)
        for name, heard_s in self._name_to_heard_s.items():
            self._name_to_heard_s[name] = min(now_s, heard_s + missed_s)
        frozen = self._suspects.judge(
            now_s, {name: now_s - self._name_to_heard_s[name] for name in name_to_pid}
        )
        asked = [
            send.message
            for send in self._suspects.take_effects()
            if isinstance(send.message, Suspect)
        ]
        for suspect in asked:
            sight = self._look_at(name_to_pid[suspect.process])
            self._suspects.sighted(
                now_s, Sighting(suspect.process, sight.waited_s, sight.is_stopped)
            )
        return frozen

    def why(self, name: str) -> str:
        """What was seen of one that is frozen, for the log; empty if nothing is to be said."""
        return self._suspects.why(name)

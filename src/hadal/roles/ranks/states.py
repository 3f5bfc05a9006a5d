"""State tables of a unit and of its ranks: (state, move) -> state. A pair without an entry is a bug
and raises InvariantError.

rank   ABSENT -> UP -> FORMING -> MEMBER; a living one -> DROPPED (to be killed)
       from any of them to ABSENT (it ended) or UP (its successor announced itself)
unit   WAITING -> FORMING -> RUNNING -> DRAINING or BROKEN -> FORMING ...
       from any of them to FORMING (form anew) or WAITING (no rank is left)

Independent of messages and deadlines.
"""

from __future__ import annotations

from enum import StrEnum

from hadal.core.errors import InvariantError


class RankState(StrEnum):
    ABSENT = "absent"
    UP = "up"
    FORMING = "forming"
    MEMBER = "member"
    DROPPED = "dropped"


class UnitPhase(StrEnum):
    WAITING = "waiting"
    """No rank is up, or some are missing and the grace time has not passed yet."""
    FORMING = "forming"
    RUNNING = "running"
    DRAINING = "draining"
    """A rank waits to join: no new steps begin."""
    BROKEN = "broken"
    """A rank lost a peer or a step, and the faulty rank is not known yet."""


_RANK_NEXT: dict[tuple[RankState, str], RankState] = {
    **{(state, "announce"): RankState.UP for state in RankState},
    **{(state, "end"): RankState.ABSENT for state in RankState},
    **{(s, "form"): RankState.FORMING for s in (RankState.UP, RankState.FORMING, RankState.MEMBER)},
    **{(s, "drop"): RankState.DROPPED for s in (RankState.UP, RankState.FORMING, RankState.MEMBER)},
    (RankState.FORMING, "formed"): RankState.MEMBER,
}
_PHASE_NEXT: dict[tuple[UnitPhase, str], UnitPhase] = {
    **{(phase, "form"): UnitPhase.FORMING for phase in UnitPhase},
    **{(phase, "empty"): UnitPhase.WAITING for phase in UnitPhase},
    (UnitPhase.FORMING, "formed"): UnitPhase.RUNNING,
    (UnitPhase.RUNNING, "drain"): UnitPhase.DRAINING,
    (UnitPhase.RUNNING, "break"): UnitPhase.BROKEN,
    (UnitPhase.DRAINING, "break"): UnitPhase.BROKEN,
}

_RUNNING = (UnitPhase.RUNNING, UnitPhase.DRAINING, UnitPhase.BROKEN)


def next_rank_state(state: RankState, move: str) -> RankState:
    """Return a rank's state after `move`. Raises InvariantError for a pair that cannot happen."""
    try:
        return _RANK_NEXT[state, move]
    except KeyError:
        raise InvariantError(f"a rank that is {state} cannot {move}") from None


def next_phase(phase: UnitPhase, move: str) -> UnitPhase:
    """Return a unit's phase after `move`. Raises InvariantError for a pair that cannot happen."""
    try:
        return _PHASE_NEXT[phase, move]
    except KeyError:
        raise InvariantError(f"a unit that is {phase} cannot {move}") from None


class UnitLifecycle:
    """Phase of a unit, and the time of its last change."""

    def __init__(self) -> None:
        self.phase = UnitPhase.WAITING
        self._since_s = 0.0
        """Time at which the phase began."""
        self._whole_until_s: float | None = None
        """Time since which no intact formation has run; None while one runs, or before the first
        begins.
        """

    @property
    def is_running(self) -> bool:
        """True if ranks may finish steps of the formation."""
        return self.phase in _RUNNING

    def phase_s(self, now_s: float) -> float:
        """Return the time since the phase began, seconds."""
        return now_s - self._since_s

    def broken_s(self, now_s: float) -> float:
        """Return the seconds for which no intact formation has run."""
        return 0.0 if self._whole_until_s is None else now_s - self._whole_until_s

    def move(self, now_s: float, move: str) -> None:
        """Change the phase. Raises InvariantError for a pair that cannot happen."""
        following = next_phase(self.phase, move)
        if following is not self.phase or move == "form":
            self._since_s = now_s
        self.phase = following
        if move == "formed":
            self._whole_until_s = None
        elif move != "drain" and self._whole_until_s is None:
            self._whole_until_s = now_s

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s` seconds during which the leader did not run."""
        self._since_s += gap_s

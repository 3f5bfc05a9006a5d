"""The states of a unit and of its ranks as tables: (state, move) -> state. A pair that is in none is a
bug and raises.

rank   ABSENT -> UP -> FORMING -> MEMBER, from each of them to ABSENT (it ended) or DROPPED (to be killed)
unit   WAITING -> FORMING -> RUNNING -> DRAINING or BROKEN -> FORMING ...

Knows no messages and no deadlines.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from hadal.core.errors import InvariantError
from hadal.core.messages.ranks import RankUp
from hadal.core.plans import Held

_NUM_DEAD_EPOCHS = 16


class RankState(StrEnum):
    ABSENT = "absent"
    UP = "up"
    FORMING = "forming"
    MEMBER = "member"
    DROPPED = "dropped"


class UnitPhase(StrEnum):
    WAITING = "waiting"
    """Nobody to form with, or not everybody is there yet and the grace goes on."""
    FORMING = "forming"
    RUNNING = "running"
    DRAINING = "draining"
    """A rank waits to join: no new steps."""
    BROKEN = "broken"
    """A rank lost a peer; who that is will be known soon."""


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
_LIVING = (RankState.UP, RankState.FORMING, RankState.MEMBER)


@dataclass(slots=True)
class RankView:
    """What is known of one rank's present process."""

    state: RankState = RankState.ABSENT
    up: RankUp | None = None
    held: Held | None = None
    """What an earlier leader's rank holds; None: nothing, or its inner leader knows it."""
    heard_s: float = 0.0
    num_ops: int = -1
    moved_s: float = 0.0
    """When its compute thread was last seen to move, or to have nothing to do."""
    progressed_s: float = 0.0
    """When it was last seen to move."""
    ended_s: float = 0.0
    killed_s: float = 0.0
    """When the supervisor was last asked to kill it."""
    num_owed: int = 0
    """UnitDowns of predecessors that are still to come: a successor was heard first."""
    dead: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_DEAD_EPOCHS))

    @property
    def epoch(self) -> str:
        return self.up.epoch if self.up is not None else ""

    @property
    def is_living(self) -> bool:
        return self.state in _LIVING

    def silent_s(self, now_s: float, *, must_move: bool) -> float:
        """Time for which it gave no sign. `must_move`: a step runs in which it takes part:
        heartbeats are not enough.
        """
        return now_s - (min(self.heard_s, self.moved_s) if must_move else self.heard_s)

    def forgive(self, gap_s: float) -> None:
        """Nobody listened for so long."""
        self.heard_s += gap_s
        self.moved_s += gap_s
        self.progressed_s += gap_s
        self.ended_s += gap_s


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

"""The fleet's units by name: the state of each as a table, and the nodes it owns.

    STOPPED -> STARTING -> UP <-> DRAINING -> STOPPING -> STOPPED        a dead process: from any of them to STOPPED
                   |______________________________^ not needed any more, or too slow

A unit owns its nodes from the moment it is asked to start until its process is gone. A pair that is
not in the table is a bug and raises: the role sorts out what comes late or twice before it moves a
unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hadal.core.errors import InvariantError


class UnitState(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    """Nothing new comes; what it holds goes on."""
    STOPPING = "stopping"
    """The unit's process was told to end."""


class UnitMove(StrEnum):
    START = "start"
    READY = "ready"
    DRAIN = "drain"
    KEEP = "keep"
    STOP = "stop"
    END = "end"
    """The unit's process is gone."""


OWNS_NODES = frozenset({UnitState.STARTING, UnitState.UP, UnitState.DRAINING, UnitState.STOPPING})
WORKS = frozenset({UnitState.STARTING, UnitState.UP})
"""Counts as one of those that are wanted."""

_NEXT: dict[tuple[UnitState, UnitMove], UnitState] = {
    (UnitState.STOPPED, UnitMove.START): UnitState.STARTING,
    (UnitState.STARTING, UnitMove.READY): UnitState.UP,
    (UnitState.STARTING, UnitMove.STOP): UnitState.STOPPING,
    (UnitState.UP, UnitMove.DRAIN): UnitState.DRAINING,
    (UnitState.DRAINING, UnitMove.KEEP): UnitState.UP,
    (UnitState.DRAINING, UnitMove.STOP): UnitState.STOPPING,
    **{(state, UnitMove.END): UnitState.STOPPED for state in OWNS_NODES},
}


def next_state(state: UnitState, move: UnitMove) -> UnitState:
    """Return the state after `move`. Raises InvariantError for a pair that cannot happen."""
    try:
        return _NEXT[state, move]
    except KeyError:
        raise InvariantError(f"a unit that is {state} cannot {move}") from None


@dataclass(slots=True)
class FleetUnit:
    """One name. It may have many lives."""

    name: str
    role: str
    index: int
    state: UnitState = UnitState.STOPPED
    since_s: float = 0.0
    """When it came to this state."""
    asked_s: float = 0.0
    """When it was last asked to do what its state is for: asked again if nothing comes of it."""
    drain_number: int = 0
    """Number of its last drain."""
    is_old: bool = False
    """It was started before the last rollout was asked for, and is to be replaced."""


class UnitTable:
    """All names there may be, `num_max` of each role: "prefill-0", "prefill-1", ... A table and its
    counts.
    """

    def __init__(self, role_to_num_max: Mapping[str, int]) -> None:
        self.by_name: dict[str, FleetUnit] = {
            f"{role}-{index}": FleetUnit(f"{role}-{index}", role, index)
            for role, num in role_to_num_max.items()
            for index in range(num)
        }
        self._role_to_units: dict[str, list[FleetUnit]] = {role: [] for role in role_to_num_max}
        for unit in self.by_name.values():
            self._role_to_units[unit.role].append(unit)

    def move(self, unit: FleetUnit, move: UnitMove, now_s: float) -> None:
        """Walk the table. Raises InvariantError for a pair that cannot happen."""
        unit.state = next_state(unit.state, move)
        unit.since_s = unit.asked_s = now_s
        if move is UnitMove.END:
            unit.is_old = False

    def of_role(self, role: str, *states: UnitState) -> Iterator[FleetUnit]:
        """Those in one of these states, in the order of their names' numbers."""
        return (unit for unit in self._role_to_units[role] if unit.state in states)

    def in_state(self, *states: UnitState) -> list[FleetUnit]:
        return [unit for unit in self.by_name.values() if unit.state in states]

    def num_working(self, role: str) -> int:
        """Up, or about to be."""
        return self._num_in(role, WORKS)

    def num_owning(self, role: str) -> int:
        """Number of units on nodes of their own."""
        return self._num_in(role, OWNS_NODES)

    def _num_in(self, role: str, states: Collection[UnitState]) -> int:
        of_role = [unit.state for unit in self._role_to_units[role]]
        return sum(of_role.count(state) for state in states)

"""Units of the fleet by name: their state table, and their ownership of nodes.

    STOPPED -> STARTING -> UP <-> DRAINING -> STOPPING -> STOPPED        a dead process: from any of them to STOPPED
                   |______________________________^ no longer needed, or too slow to start

A unit owns its nodes from the request to start it until its process has ended. A (state, move) pair
without an entry in `_NEXT` is a bug and raises InvariantError: the fleet drops late and repeated
messages before it moves a unit.
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
    """The unit gets no new requests; its present ones continue."""
    STOPPING = "stopping"
    """The unit's process was requested to end."""


class UnitMove(StrEnum):
    START = "start"
    READY = "ready"
    DRAIN = "drain"
    KEEP = "keep"
    STOP = "stop"
    END = "end"
    """The unit's process has ended."""


OWNS_NODES = frozenset({UnitState.STARTING, UnitState.UP, UnitState.DRAINING, UnitState.STOPPING})
WORKS = frozenset({UnitState.STARTING, UnitState.UP})
"""States that count towards the wanted number of units."""

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
    """State of the unit with this name, kept over all its starts and ends."""

    name: str
    role: str
    index: int
    state: UnitState = UnitState.STOPPED
    since_s: float = 0.0
    """Time at which the unit entered its state."""
    asked_s: float = 0.0
    """Time of the unit's last change of state or message to it; resending counts from it."""
    drain_number: int = 0
    """Id of the unit's latest drain, sent in `DrainUnit`. A front that reports another number has not
    received this drain.
    """
    is_old: bool = False
    """True if the unit was started before the last rollout began, which must replace it."""


class UnitTable:
    """All possible units, `num_max` per role, by name: "prefill-0", "prefill-1", ..."""

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
        """Change a unit's state. Raises InvariantError for a pair that cannot happen."""
        unit.state = next_state(unit.state, move)
        unit.since_s = unit.asked_s = now_s
        if move is UnitMove.END:
            unit.is_old = False

    def of_role(self, role: str, *states: UnitState) -> Iterator[FleetUnit]:
        """Return a role's units in one of these states, in the order of their numbers."""
        return (unit for unit in self._role_to_units[role] if unit.state in states)

    def in_state(self, *states: UnitState) -> list[FleetUnit]:
        return [unit for unit in self.by_name.values() if unit.state in states]

    def num_working(self, role: str) -> int:
        """Return the number of units that are up or starting."""
        return self._num_in(role, WORKS)

    def num_owning(self, role: str) -> int:
        """Return the number of units that own nodes."""
        return self._num_in(role, OWNS_NODES)

    def _num_in(self, role: str, states: Collection[UnitState]) -> int:
        of_role = [unit.state for unit in self._role_to_units[role]]
        return sum(of_role.count(state) for state in states)

"""Faults of a simulated world with their times: ranks and nodes that die, slow ranks, disks that
fail, units that die or start late.

Values only; lab/sim/world/world injects them. Units are named as on the wire ("decode-0"); times
are simulated seconds of the world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RanksDie:
    """Death of ranks. Their unit works without them after `form_s`, with them after `back_s`."""

    at_s: float
    unit: str
    ranks: tuple[int, ...]
    form_s: float = 2.0
    """Seconds from the death until the unit works without these ranks."""
    back_s: float = 60.0
    """Seconds from the death until these ranks are back with empty pools. Above `form_s`."""


@dataclass(frozen=True)
class RankSlow:
    """Slow rank: its part of each step takes `factor` times as long."""

    begin_s: float
    end_s: float
    unit: str
    rank: int
    factor: float


@dataclass(frozen=True)
class DiskLost:
    """Failed disk of a node: its ranks' new reads fail, after the reads queued before them."""

    begin_s: float
    end_s: float
    unit: str
    node: int | None = None
    """Index of the node within the unit. None: all nodes of the unit."""


@dataclass(frozen=True)
class UnitDies:
    """Death of a unit: its leader and all ranks. The front is notified, and the unit restarts."""

    at_s: float
    unit: str
    notice_s: float = 0.1
    """Seconds from the death until the front is notified."""
    start_s: float = 60.0
    """Seconds from the death until the unit starts again."""


@dataclass(frozen=True)
class UnitLate:
    """Late start: the unit is not up before `start_s`."""

    unit: str
    start_s: float


@dataclass(frozen=True)
class WorldFaults:
    """All faults of one world. Raises ValueError for impossible times, ranks or factors."""

    ranks: tuple[RanksDie, ...] = ()
    slow: tuple[RankSlow, ...] = ()
    disks: tuple[DiskLost, ...] = ()
    units: tuple[UnitDies, ...] = ()
    late: tuple[UnitLate, ...] = ()

    def __post_init__(self) -> None:
        for one in self.ranks:
            if not one.ranks or not 0.0 <= one.form_s < one.back_s:
                raise ValueError(
                    f"{one}: a fault needs at least one rank, and its ranks must come back"
                    " after the unit has formed."
                )
        for slow in self.slow:
            if slow.factor < 1.0 or slow.end_s <= slow.begin_s:
                raise ValueError(
                    f"{slow}: factor must be at least 1, and end_s later than begin_s."
                )
        for dies in self.units:
            if not 0.0 <= dies.notice_s < dies.start_s:
                raise ValueError(
                    f"{dies}: notice_s must be from 0 to below start_s, so that"
                    " the front learns of the failure before the unit restarts."
                )

    def check(self, unit_to_ranks: Mapping[str, int]) -> None:
        """Raise ValueError if a fault names a unit or rank that does not exist."""
        named: list[tuple[str, Iterable[int]]] = [(one.unit, one.ranks) for one in self.ranks]
        named += [(one.unit, (one.rank,)) for one in self.slow]
        named += [(one.unit, ()) for some in (self.disks, self.units, self.late) for one in some]
        for unit, ranks in named:
            if unit not in unit_to_ranks or any(
                not 0 <= rank < unit_to_ranks[unit] for rank in ranks
            ):
                raise ValueError(
                    f"a fault names {unit}, ranks {tuple(ranks)}; the units and their"
                    f" ranks are {dict(unit_to_ranks)}."
                )

    def start_s(self, unit: str) -> float:
        """Return the earliest time at which a unit may start, seconds."""
        return max((one.start_s for one in self.late if one.unit == unit), default=0.0)

    def num_loaded(self, now_s: float, node: tuple[str, int], num_blocks: int) -> int:
        """Return how many of `num_blocks` a read by (unit, node index) gets now: all or 0."""
        unit, index = node
        is_lost = any(
            one.unit == unit and one.node in (None, index) and one.begin_s <= now_s < one.end_s
            for one in self.disks
        )
        return 0 if is_lost else num_blocks

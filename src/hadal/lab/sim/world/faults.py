"""What goes wrong in a simulated world, and when: ranks and nodes that die, ranks that are slow, disks
that fail, units that die or start late.

Values only; lab/sim/world/world plays them. Units are named as they are on the wire ("decode-0"), times
are the world's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RanksDie:
    """One rank, or all of a node: the unit forms without them, and again when they are back."""

    at_s: float
    unit: str
    ranks: tuple[int, ...]
    form_s: float = 2.0
    """Time until the unit works without them."""
    back_s: float = 60.0
    """Time from their death until they are back with empty pools; it is later than the forming."""


@dataclass(frozen=True)
class RankSlow:
    """A rank's part of each step takes `factor` times as long."""

    begin_s: float
    end_s: float
    unit: str
    rank: int
    factor: float


@dataclass(frozen=True)
class DiskLost:
    """Reads of a node fail at once."""

    begin_s: float
    end_s: float
    unit: str
    node: int | None = None
    """Index of the node among those of the unit; None: all of the unit."""


@dataclass(frozen=True)
class UnitDies:
    """A unit dies, its leader with all ranks: the front hears of it, and it starts again."""

    at_s: float
    unit: str
    notice_s: float = 0.1
    """Time until the front hears of it."""
    start_s: float = 60.0
    """Time from its death until it is up again."""


@dataclass(frozen=True)
class UnitLate:
    """Is not up before `start_s`."""

    unit: str
    start_s: float


@dataclass(frozen=True)
class WorldFaults:
    """All of one world. Raises ValueError for what cannot be."""

    ranks: tuple[RanksDie, ...] = ()
    slow: tuple[RankSlow, ...] = ()
    disks: tuple[DiskLost, ...] = ()
    units: tuple[UnitDies, ...] = ()
    late: tuple[UnitLate, ...] = ()

    def __post_init__(self) -> None:
        for one in self.ranks:
            if not one.ranks or not 0.0 <= one.form_s < one.back_s:
                raise ValueError(
                    f"{one}: somebody has to die, and come back after the unit has formed."
                )
        for slow in self.slow:
            if slow.factor < 1.0 or slow.end_s <= slow.begin_s:
                raise ValueError(f"{slow}: a slow rank takes longer, for some time.")
        for dies in self.units:
            if not 0.0 <= dies.notice_s < dies.start_s:
                raise ValueError(f"{dies}: the front hears of a death before the unit is up again.")

    def check(self, unit_to_ranks: Mapping[str, int]) -> None:
        """Raises ValueError if one is of a unit or rank that there is not."""
        named: list[tuple[str, Iterable[int]]] = [(one.unit, one.ranks) for one in self.ranks]
        named += [(one.unit, (one.rank,)) for one in self.slow]
        named += [(one.unit, ()) for some in (self.disks, self.units, self.late) for one in some]
        for unit, ranks in named:
            if unit not in unit_to_ranks or any(
                not 0 <= rank < unit_to_ranks[unit] for rank in ranks
            ):
                raise ValueError(
                    f"a fault is of {unit}, ranks {tuple(ranks)}; there are {dict(unit_to_ranks)}."
                )

    def start_s(self, unit: str) -> float:
        """When a unit may be up first."""
        return max((one.start_s for one in self.late if one.unit == unit), default=0.0)

    def num_loaded(self, now_s: float, node: tuple[str, int], num_blocks: int) -> int:
        """Return how many of `num_blocks` a read of a unit's node brings now: all or none."""
        unit, index = node
        is_lost = any(
            one.unit == unit and one.node in (None, index) and one.begin_s <= now_s < one.end_s
            for one in self.disks
        )
        return 0 if is_lost else num_blocks

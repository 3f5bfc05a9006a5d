"""Ranks of a simulated unit die and come back: the events that its leader gets."""

from __future__ import annotations

from hadal.core.seams import Effect, Event, RankReset
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.runners import DecodeRunner
from hadal.lab.sim.world.clock import SimClock
from hadal.lab.sim.world.process import Process
from hadal.lab.sim.world.units import SimUnit
from tests.unit.lab.sim.world.test_process import Around


class Listener:
    """A role that records its events."""

    def __init__(self) -> None:
        self.resets: list[RankReset] = []

    def start(self, now_s: float) -> list[Effect]:
        return []

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        self.resets += [event for event in events if isinstance(event, RankReset)]
        return []


def unit(pools: set[str]) -> tuple[SimUnit, Listener]:
    role = Listener()
    process = Process("decode-0", role, SimClock(), Around())
    made = SimUnit(
        "decode-0", 7, process, DecodeRunner(StepModel(4), 2, lambda number: 9), 4, pools
    )
    made.begin()
    return made, role


def test_ranks_die_and_come_back_with_new_pools() -> None:
    pools: set[str] = set()
    made, role = unit(pools)
    assert (made.num_living, len(pools), role.resets[0].fresh) == (4, 4, (0, 1, 2, 3))
    before = role.resets[0].pools
    assert made.lose((1, 3))
    assert len(role.resets) == 1, "it is told when the unit has formed"
    assert pools == {before[0], before[2]}
    assert not made.lose((3,)), "dead already"
    made.form()
    made.form()
    found = [(reset.lost, reset.fresh, reset.formation) for reset in role.resets[1:]]
    assert found == [((1, 3), (), 2)]
    assert role.resets[1].pools == (before[0], "", before[2], "")
    made.come((0, 1))
    assert (role.resets[2].lost, role.resets[2].fresh, made.num_living) == ((), (1,), 3)
    assert role.resets[2].pools[1] not in before


def test_who_is_back_before_the_unit_has_formed_was_lost_all_the_same() -> None:
    made, role = unit(set())
    made.lose((2,))
    made.come((2,))
    made.form()
    assert [(reset.lost, reset.fresh) for reset in role.resets[1:]] == [((2,), (2,))]


def test_a_unit_that_ended_is_told_nothing() -> None:
    pools = {"another's"}
    made, role = unit(pools)
    made.lose((2,))
    made.end()
    made.form()
    made.come((2,))
    assert not made.lose((1,))
    assert len(role.resets) == 1
    assert pools == {"another's"}

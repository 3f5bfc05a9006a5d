"""Test the fleet's executor with children that only record: they rest until wanted, end when asked,
and are killed if they do not end.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hadal.core.config import Deployment, FleetConfig, UnitsConfig
from hadal.core.messages.fleet import Demand, DrainUnit, UnitFacts
from hadal.core.messages.units import UnitUp
from hadal.roles.fleet.fleet import make_fleet
from hadal.runtime.fleet import STOP_S, FleetExecutor
from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.process.relay import OutputRelay


class FakeChild(Child):
    """Child without a process; it keeps its signals."""

    def __init__(self, name: str) -> None:
        super().__init__(name, name.split("-")[0], ["nothing"], OutputRelay(name, None))
        self.signals: list[signal.Signals] = []
        self.num_replaced = 0

    def replace(self) -> None:
        self.num_replaced += 1

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


class World:
    def __init__(
        self, *, ranks: int = 1, running: tuple[str, ...] = (), left: tuple[str, ...] = ()
    ) -> None:
        deployment = Deployment(
            decode=UnitsConfig(ranks=ranks),
            fleet=FleetConfig(
                "auto",
                decode_max=2,
                decode_tokens_per_s=100.0,
                decode_use=1.0,
                start_s=1.0,
                period_s=1.0,
                hold_s=1.0,
            ),
        )
        names = ["prefill-0", "decode-0", "decode-1", "gateway"]
        names += [
            f"decode-{unit}.{rank}" for unit in range(2) for rank in range(ranks) if ranks > 1
        ]
        self.children: dict[str, FakeChild] = {name: FakeChild(name) for name in names}
        for name in running:
            self.children[name].phase = ProcessPhase.READY
        for name in left:
            self.children[name].is_adopted = True
        self.sent: list[tuple[str, Any]] = []
        self.now_s, self.tokens = 0.0, 0
        fleet = make_fleet(deployment, 0.0)
        self.executor = FleetExecutor(
            fleet, fleet, self.children, lambda *what: self.sent.append(what), 0.0
        )

    def phases(self) -> list[str]:
        return [
            child.phase.value for child in self.children.values() if child.name.startswith("decode")
        ]

    def up(self, unit: str) -> None:
        for child in self.children.values():
            if child.name.startswith(unit):
                child.phase = ProcessPhase.READY
        self.executor.tell(self.now_s, UnitUp(unit, unit.split("-")[0], f"{self.now_s}", 1, 1))

    def ends(self, unit: str) -> bool:
        """Let the child end, as when the supervisor reaps it."""
        child = self.children[unit]
        child.phase = ProcessPhase.WAITING if child.is_wanted else ProcessPhase.RESTING
        return self.executor.ended(self.now_s, unit, "it ended")

    def goes_on(self, rate: int, seconds: int, draining: dict[str, int] | None = None) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.tokens += rate
            facts = tuple(
                UnitFacts(unit, "decode", 0, number) for unit, number in (draining or {}).items()
            )
            self.executor.tell(self.now_s, Demand("f", 0, self.tokens, 0, 0, facts))
            self.executor.tick(self.now_s)


def test_only_the_floor_is_wanted_at_first() -> None:
    world = World()
    assert [child.phase.value for child in world.children.values()] == [
        "waiting",
        "waiting",
        "resting",
        "waiting",
    ]
    assert set(world.executor.units) == {"prefill-0", "decode-0", "decode-1"}


def test_units_above_the_floor_that_run_when_it_begins_are_kept_as_any_that_were_needed() -> None:
    world = World(running=("prefill-0", "decode-0", "decode-1"))
    assert world.sent == [], "nothing is known of the demand, so nobody is asked to go"
    world.goes_on(50, 1)
    assert world.sent == []
    world.goes_on(50, 30)
    assert [sent.unit for _, sent in world.sent if isinstance(sent, DrainUnit)][:1] == ["decode-1"]


def test_ranks_that_were_left_without_a_leader_end_where_no_unit_is_asked_for() -> None:
    world = World(ranks=2, running=("prefill-0", "decode-0"), left=("decode-0.0", "decode-1.0"))
    assert world.children["decode-1.0"].num_replaced == 1
    assert world.children["decode-0.0"].num_replaced == 0, "its leader runs"


def test_units_that_run_when_it_begins_are_counted_and_nothing_is_started_for_them() -> None:
    """A dead supervisor may have left running units: here the second decode unit, not the first."""
    world = World(running=("prefill-0", "decode-1"))
    assert world.phases() == ["resting", "ready"]
    assert world.children["decode-1"].is_wanted
    world.goes_on(150, 3)
    assert world.phases() == ["waiting", "ready"], "there is work for two"
    world.up("decode-0")
    world.goes_on(50, 30)
    drained = {sent.unit for _, sent in world.sent if isinstance(sent, DrainUnit)}
    assert len(drained) == 1, "it is asked to go as any other"


def test_a_unit_is_wanted_drained_stopped_and_rests() -> None:
    world = World()
    world.up("prefill-0")
    world.up("decode-0")
    world.goes_on(150, 3)
    assert world.phases() == ["ready", "waiting"]
    world.up("decode-1")
    world.goes_on(50, 30)
    to, drain = next(sent for sent in world.sent if isinstance(sent[1], DrainUnit))
    assert (to, drain.unit) == ("front", "decode-1")
    world.goes_on(50, 1, {"decode-1": drain.number})
    assert world.children["decode-1"].signals == [signal.SIGTERM]
    assert not world.children["decode-1"].is_wanted
    world.goes_on(50, int(STOP_S) + 1)
    assert world.children["decode-1"].signals == [signal.SIGTERM, signal.SIGKILL]
    assert world.ends("decode-1")
    assert world.phases() == ["ready", "resting"]


def test_one_that_ends_by_itself_is_wanted_again() -> None:
    world = World()
    world.up("decode-0")
    assert not world.ends("decode-0")
    assert world.phases() == ["waiting", "resting"]
    assert world.children["decode-0"].is_wanted


def test_a_unit_of_many_processes_comes_and_goes_as_one() -> None:
    world = World(ranks=2)
    assert world.phases() == ["waiting", "resting", "waiting", "waiting", "resting", "resting"]
    world.up("prefill-0")
    world.up("decode-0")
    world.goes_on(150, 3)
    names = ("decode-1", "decode-1.0", "decode-1.1")
    assert [world.children[name].phase for name in names] == [ProcessPhase.WAITING] * 3
    world.ends("decode-0")
    assert all(world.children[name].is_wanted for name in ("decode-0", "decode-0.0", "decode-0.1"))


def test_a_start_that_is_called_off_before_it_began_ends_at_the_next_tick(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "hadal.fleet")
    world = World()
    world.up("prefill-0")
    world.up("decode-0")
    world.goes_on(150, 3)
    assert world.phases() == ["ready", "waiting"]
    world.goes_on(0, 30)
    assert world.children["decode-1"].signals == []
    assert world.phases() == ["ready", "resting"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-2:] == ["stopping decode-1", "decode-1 has ended: it was not running"]


def test_ranks_that_run_before_their_leader_end_with_a_start_that_is_called_off() -> None:
    world = World(ranks=2)
    world.up("prefill-0")
    world.up("decode-0")
    world.goes_on(150, 3)
    ranks = [world.children[f"decode-1.{index}"] for index in range(2)]
    for rank in ranks:
        rank.phase = ProcessPhase.READY
    assert world.children["decode-1"].phase is ProcessPhase.WAITING
    world.goes_on(0, 30)
    assert world.children["decode-1"].phase is ProcessPhase.RESTING
    assert all(rank.num_replaced == 1 and not rank.is_wanted for rank in ranks)


def test_what_the_front_is_told_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hadal.fleet")
    test_a_unit_is_wanted_drained_stopped_and_rests()
    lines = [record.getMessage() for record in caplog.records]
    assert "starting decode-1 (grow: decode needs 1.50 units now, 1.50 soon, keeps 1.53)" in lines
    assert any(
        line.startswith("draining decode-1 for at most 120 s (shrink: decode needs 0.")
        for line in lines
    )


def test_a_unit_can_be_spared_where_another_of_its_role_works() -> None:
    world = World()
    assert not world.executor.has_other("decode-1")
    world.up("decode-0")
    assert world.executor.has_other("decode-1")
    assert not world.executor.has_other("decode-0")


@pytest.mark.parametrize("phase", [ProcessPhase.STARTING, ProcessPhase.READY])
def test_a_child_that_is_not_wanted_runs_on_until_it_ends(phase: ProcessPhase) -> None:
    child = FakeChild("decode-0")
    child.phase = phase
    child.dismiss()
    assert child.phase is phase
    child.want(1.0)
    assert child.phase is phase
    child.phase = ProcessPhase.WAITING
    child.dismiss()
    assert child.phase is ProcessPhase.RESTING
    child.want(5.0)
    assert (child.phase, child.backoff.start_at_s) == (ProcessPhase.WAITING, 5.0)

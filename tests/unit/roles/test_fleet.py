"""Test the fleet by hand: growth, drains, replacements; failed starts, lost messages, dead fronts."""

from __future__ import annotations

from typing import Any

import pytest

from hadal.core.errors import InvariantError
from hadal.core.messages.fleet import Demand, DrainUnit, KeepUnit, Rollout, UnitFacts
from hadal.core.messages.units import Drain, UnitDown, UnitUp
from hadal.core.seams import (
    FleetEffect,
    OfferNodes,
    Send,
    StartUnit,
    StopUnit,
    Tick,
    WakeAt,
    WithdrawNodes,
)
from hadal.policy.scaling import RoleRules, ScalingRules, Units
from hadal.roles.fleet.fleet import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    DRAIN_GRACE_S,
    RESEND_S,
    START_TIMEOUT_MIN_S,
    Fleet,
)
from hadal.roles.fleet.units import UnitState

PERIOD_S, HOLD_S, DRAIN_S = 10.0, 60.0, 100.0


class Driver:
    """Fleet and a front that counts: 1,000 tokens/s use one unit of either role fully."""

    def __init__(
        self, *, num_nodes: int = 60, rules: ScalingRules | None = None, **options: Any
    ) -> None:
        rules = rules or ScalingRules(
            RoleRules(2, 1.0, 1, 8),
            RoleRules(5, 1.0, 1, 6),
            num_nodes_max=num_nodes,
            start_s=30.0,
            period_s=PERIOD_S,
            hold_s=HOLD_S,
            margin=0.0,
        )
        self.fleet = Fleet(
            rules,
            drain_timeout_s=DRAIN_S,
            **({"prefill_tokens_per_s": 1e3, "decode_tokens_per_s": 1e3} | options),
        )
        self.now_s = 0.0
        self.tokens = [0.0, 0.0]
        self.held: dict[str, int] = {}
        self.draining: dict[str, int] = {}
        self.epoch = "f1"
        self.is_deaf = False
        """True: messages to the front are lost."""
        self.last = self.do(self.fleet.start(0.0))

    def do(self, effects: list[FleetEffect]) -> list[FleetEffect]:
        for effect in effects:
            if isinstance(effect, Send) and not self.is_deaf:
                if isinstance(effect.message, DrainUnit):
                    self.draining[effect.message.unit] = effect.message.number
                elif isinstance(effect.message, KeepUnit):
                    self.draining.pop(effect.message.unit, None)
        assert self.fleet.check() == []
        return effects

    def tell(self, event: Any) -> list[FleetEffect]:
        self.last = self.do(self.fleet.handle(self.now_s, event))
        return self.last

    def up(self, *units: str) -> list[FleetEffect]:
        return [
            e
            for unit in units
            for e in self.tell(UnitUp(unit, unit.split("-")[0], f"{self.now_s}", 1, 1))
        ]

    def down(self, unit: str) -> list[FleetEffect]:
        self.held.pop(unit, None)
        self.draining.pop(unit, None)
        return self.tell(UnitDown(unit, "it ended"))

    def goes_on(self, prefill: float, decode: float, beats: int = 1) -> list[FleetEffect]:
        """Let this demand last for some periods; return all effects."""
        effects = []
        for _ in range(beats):
            self.now_s += PERIOD_S
            self.tokens = [self.tokens[0] + prefill * PERIOD_S, self.tokens[1] + decode * PERIOD_S]
            up = [u.name for u in self.fleet.table.in_state(UnitState.UP, UnitState.DRAINING)]
            facts = tuple(
                UnitFacts(
                    unit, unit.split("-")[0], self.held.get(unit, 0), self.draining.get(unit, 0)
                )
                for unit in up
            )
            effects += self.tell(
                Demand(self.epoch, round(self.tokens[0]), round(self.tokens[1]), 0, 0, facts)
            )
        return effects

    def states(self, role: str = "decode") -> list[str]:
        return [unit.state.value for unit in self.fleet.table.of_role(role, *UnitState)]

    def at_floor(self) -> Driver:
        """Bring up one unit of each role."""
        self.up("prefill-0", "decode-0")
        return self

    def grown(self) -> Driver:
        """Bring up 3 prefill and 3 decode units, all needed for a while."""
        self.at_floor()
        self.goes_on(3000.0, 3000.0, 4)
        self.up("prefill-1", "prefill-2", "decode-1", "decode-2")
        self.goes_on(3000.0, 3000.0, 20)
        assert self.states("prefill")[:4] == self.states()[:4] == ["up", "up", "up", "stopped"]
        self.held = {"decode-0": 1, "decode-1": 1, "decode-2": 1}
        return self

    def drained(self) -> DrainUnit:
        """Halve the demand for decode until a unit must drain; return the order."""
        for _ in range(40):
            for drain in sends(self.goes_on(3000.0, 1500.0), DrainUnit):
                assert isinstance(drain, DrainUnit)
                return drain
        pytest.fail("nothing was drained")


def starts(effects: list[FleetEffect]) -> list[str]:
    return [effect.unit for effect in effects if isinstance(effect, StartUnit)]


def stops(effects: list[FleetEffect]) -> list[str]:
    return [effect.unit for effect in effects if isinstance(effect, StopUnit)]


def sends(effects: list[FleetEffect], kind: type) -> list[Any]:
    return [
        effect.message
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    ]


def test_it_starts_the_floor_and_offers_the_rest() -> None:
    driver = Driver()
    assert starts(driver.last) == ["prefill-0", "decode-0"] or starts(driver.last) == [
        "decode-0",
        "prefill-0",
    ]
    assert [e for e in driver.last if isinstance(e, OfferNodes)] == [OfferNodes(53)]
    assert len([e for e in driver.last if isinstance(e, WakeAt)]) == 1


def test_it_grows_with_the_demand_and_takes_nodes_back_first() -> None:
    driver = Driver().at_floor()
    effects = driver.goes_on(2500.0, 1500.0, 3)
    assert sorted(starts(effects)) == ["decode-1", "prefill-1", "prefill-2"]
    assert [e.num_nodes for e in effects if isinstance(e, WithdrawNodes)] == [9]
    index = next(i for i, e in enumerate(effects) if isinstance(e, StartUnit))
    assert any(isinstance(e, WithdrawNodes) for e in effects[:index])


@pytest.mark.promise("The unit is stopped when the front counts no request on it in that drain.")
def test_it_drains_what_is_not_needed_and_stops_it_when_it_is_empty() -> None:
    driver = Driver().grown()
    driver.held = {"decode-0": 3, "decode-1": 1, "decode-2": 2, "prefill-2": 1}
    drain = driver.drained()
    assert (drain.unit, drain.timeout_s) == ("decode-1", DRAIN_S)  # decode-1 has the fewest.
    assert stops(driver.goes_on(3000.0, 1500.0, 3)) == []
    del driver.held["decode-1"]
    assert stops(driver.goes_on(3000.0, 1500.0)) == ["decode-1"]
    assert [e for e in driver.down("decode-1") if isinstance(e, OfferNodes)] == [OfferNodes(5)]
    assert driver.states()[:3] == ["up", "stopped", "up"]


@pytest.mark.promise("The unit is stopped when the front counts no request on it in that drain.")
def test_what_it_counted_before_a_drain_says_nothing_of_it() -> None:
    """A unit that was empty in an earlier drain may have received work since."""
    driver = Driver().grown()
    drain = driver.drained()
    old = UnitFacts(drain.unit, "decode", 0, drain.number + 1)
    driver.tell(Demand("f1", round(driver.tokens[0]), round(driver.tokens[1]), 0, 0, (old,)))
    assert "stopping" not in driver.states()


@pytest.mark.promise("A growing fleet takes draining units back before it starts others.")
def test_a_draining_unit_is_taken_back_before_another_is_started() -> None:
    driver = Driver().grown()
    drain = driver.drained()
    effects = driver.goes_on(3000.0, 3000.0, 5)
    assert [keep.unit for keep in sends(effects, KeepUnit)] == [drain.unit]
    assert starts(effects) == []
    assert driver.states()[:3] == ["up", "up", "up"]


def test_a_unit_that_is_not_needed_any_more_is_stopped_while_it_starts() -> None:
    driver = Driver().at_floor()
    driver.goes_on(500.0, 1500.0, 3)
    assert driver.states()[:2] == ["up", "starting"]
    effects = driver.goes_on(500.0, 500.0, 40)
    assert "decode-1" in stops(effects)
    assert sends(effects, DrainUnit) == []
    driver.down("decode-1")
    assert driver.states()[:2] == ["up", "stopped"]


@pytest.mark.promise(
    "so a lost message, a failed start or a dead unit is corrected at the next event"
)
def test_the_dead_are_replaced_at_once() -> None:
    driver = Driver().grown()
    assert starts(driver.down("decode-1")) == ["decode-1"]
    assert starts(driver.down("prefill-0")) == ["prefill-0"]


def test_a_unit_that_dies_while_it_drains_is_not() -> None:
    driver = Driver().grown()
    drain = driver.drained()
    effects = driver.down(drain.unit)
    assert starts(effects) == []
    assert OfferNodes(5) in effects


@pytest.mark.promise(
    "so a lost message, a failed start or a dead unit is corrected at the next event"
)
def test_failed_starts_back_off_and_one_that_works_ends_it() -> None:
    driver = Driver()
    driver.up("prefill-0")
    expected_s = BACKOFF_S
    for _ in range(9):
        assert starts(driver.down("decode-0")) == []
        (wake,) = [e for e in driver.tell(Tick()) if isinstance(e, WakeAt)] or [
            WakeAt(driver.now_s)
        ]
        assert wake.time_s <= driver.now_s + expected_s
        driver.now_s += expected_s - 0.25
        assert starts(driver.tell(Tick())) == []
        driver.now_s += 0.25
        assert starts(driver.tell(Tick())) == ["decode-0"]
        expected_s = min(2 * expected_s, BACKOFF_MAX_S)
    driver.up("decode-0")
    assert starts(driver.down("decode-0")) == ["decode-0"]


def test_a_start_that_never_ends_is_given_up() -> None:
    driver = Driver()
    driver.now_s = START_TIMEOUT_MIN_S + 1.0
    assert sorted(stops(driver.tell(Tick()))) == ["decode-0", "prefill-0"]
    assert driver.up("decode-0") is not None  # This report is too late.
    assert driver.states()[0] == "stopping"
    driver.now_s += BACKOFF_S
    assert "decode-0" in starts(driver.down("decode-0"))


@pytest.mark.promise(
    "so a lost message, a failed start or a dead unit is corrected at the next event"
)
def test_what_the_front_did_not_hear_is_said_again() -> None:
    driver = Driver().grown()
    driver.is_deaf = True
    drains = [driver.drained(), *sends(driver.goes_on(3000.0, 1500.0, 4), DrainUnit)]
    assert len(drains) == 5
    assert len({(drain.unit, drain.number) for drain in drains}) == 1
    assert [d.timeout_s for d in drains] == sorted((d.timeout_s for d in drains), reverse=True)
    driver.is_deaf = False
    driver.goes_on(3000.0, 1500.0, 2)
    driver.is_deaf = True
    assert sends(driver.goes_on(3000.0, 3000.0, 5), KeepUnit)
    assert driver.draining
    driver.is_deaf = False
    assert sends(driver.goes_on(3000.0, 3000.0, 3), KeepUnit)
    assert driver.draining == {}
    assert sends(driver.goes_on(3000.0, 3000.0, 3), KeepUnit) == []


def test_a_new_front_hears_of_the_drains() -> None:
    driver = Driver().grown()
    drain = driver.drained()
    driver.epoch, driver.draining, driver.tokens = "f2", {}, [0.0, 0.0]
    again = sends(driver.goes_on(3000.0, 1500.0, 2), DrainUnit)
    assert {d.unit for d in again} == {drain.unit}


def test_a_drain_that_nobody_ends_is_ended() -> None:
    driver = Driver().grown()
    drain = driver.drained()
    driver.now_s += DRAIN_S + DRAIN_GRACE_S
    assert stops(driver.tell(Tick())) == [drain.unit]
    driver.now_s += RESEND_S
    assert stops(driver.tell(Tick())) == [drain.unit]  # Repeated: it may have been lost.


def test_it_never_takes_more_nodes_than_there_are() -> None:
    driver = Driver(num_nodes=20).at_floor()
    driver.goes_on(9e3, 9e3, 10)
    assert driver.fleet.num_nodes <= 20
    assert driver.fleet.need.decision is not None
    assert driver.fleet.need.decision.why.bound == "nodes"
    assert driver.fleet.need.units == Units(5, 2)


def test_nodes_that_a_draining_unit_still_has_are_waited_for() -> None:
    driver = Driver(num_nodes=17).at_floor()
    driver.goes_on(1000.0, 3000.0, 5)
    driver.up("decode-1", "decode-2")
    driver.held = {"decode-0": 1, "decode-1": 1, "decode-2": 1}
    effects = driver.goes_on(4000.0, 900.0, 40)
    assert len(sends(effects, DrainUnit)) == 2
    assert driver.fleet.num_nodes == 17
    assert driver.states("prefill")[1] == "stopped"
    unit = next(iter(driver.draining))
    driver.now_s += DRAIN_S + DRAIN_GRACE_S
    driver.tell(Tick())
    assert starts(driver.down(unit)) == ["prefill-1", "prefill-2"]


def test_units_say_themselves_what_they_can_do() -> None:
    driver = Driver(prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0).at_floor()
    driver.goes_on(5000.0, 5000.0, 5)
    assert driver.fleet.need.units == Units(1, 1)  # No unit has measured its rate yet.
    facts = (UnitFacts("decode-0", "decode", 1, 0, 1250.0), UnitFacts("prefill-0", "prefill", 1, 0))
    driver.now_s += PERIOD_S
    driver.tokens = [t + 5000.0 * PERIOD_S for t in driver.tokens]
    driver.tell(Demand("f1", round(driver.tokens[0]), round(driver.tokens[1]), 0, 0, facts))
    assert driver.fleet.need.units == Units(1, 4)


def test_it_wakes_for_its_reviews_without_being_told_anything() -> None:
    driver = Driver().at_floor()
    (wake,) = [e for e in driver.tell(Tick()) if isinstance(e, WakeAt)] or [WakeAt(PERIOD_S)]
    driver.now_s = wake.time_s
    found = [e.time_s for e in driver.tell(Tick()) if isinstance(e, WakeAt)]
    assert found == [wake.time_s + PERIOD_S]


def test_strangers_and_what_it_cannot_take() -> None:
    driver = Driver()
    before = driver.fleet.counts()
    driver.tell(UnitUp("decode-99", "decode", "e", 1, 1))
    driver.tell(UnitDown("somebody", "gone"))
    driver.tell(UnitDown("decode-5", "it never ran"))
    assert driver.fleet.counts() == before
    with pytest.raises(InvariantError, match="cannot handle Drain"):
        driver.fleet.handle(0.0, Drain())


def test_check_sees_nodes_that_do_not_add_up() -> None:
    driver = Driver()
    driver.fleet.table.by_name["decode-3"].state = UnitState.UP
    assert driver.fleet.check()


def test_check_sees_units_that_nobody_may_want() -> None:
    driver = Driver()
    driver.fleet.need.units = Units(1, 0)
    assert "0 decode units are wanted, out of bounds" in driver.fleet.check()


class RollingOut(Driver):
    """Fleet of a fixed number of units, all up, that is rolled out."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        super().__init__(
            rules=ScalingRules(
                RoleRules(2, 1.0, num_prefill, num_prefill),
                RoleRules(5, 1.0, num_decode, num_decode),
                num_nodes_max=2 * num_prefill + 5 * num_decode,
                start_s=30.0,
                period_s=PERIOD_S,
                hold_s=HOLD_S,
                margin=0.0,
            )
        )
        self.up(*starts(self.last))
        self.tell(Rollout())

    def replace(self) -> str:
        """Let the draining unit become empty, end, and come up again; return its name."""
        (unit,) = self.fleet.table.in_state(UnitState.DRAINING)
        assert stops(self.goes_on(0.0, 0.0)) == [unit.name]
        assert starts(self.down(unit.name)) == [unit.name]
        self.up(unit.name)
        return unit.name


@pytest.mark.promise(
    "the units of the running server are replaced one by one, and no request fails"
)
def test_a_rollout_replaces_one_unit_after_the_other() -> None:
    driver = RollingOut(1, 3)
    assert driver.fleet.num_unreplaced == 4
    replaced = [driver.replace() for _ in range(4)]
    assert sorted(replaced) == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    assert replaced.index("prefill-0") == 1, "no role is further than the other"
    assert driver.fleet.num_unreplaced == 0
    driver.goes_on(0.0, 0.0, 3)
    assert set(driver.states()) == set(driver.states("prefill")) == {"up"}


@pytest.mark.promise(
    "The old unit finishes its requests and ends; a new one starts with the code that "
    "is installed on its node by then."
)
def test_what_an_old_unit_holds_is_waited_for() -> None:
    driver = RollingOut(1, 1)
    driver.held = {"decode-0": 3}
    assert driver.states() == ["draining"]
    driver.goes_on(0.0, 0.0, 3)
    assert driver.states() == ["draining"], "and it is not kept, though it is missing"
    assert driver.states("prefill") == ["up"]
    driver.held = {}
    assert driver.replace() == "decode-0"


@pytest.mark.promise(
    "If a new unit does not come up, the rollout ends there and the remaining old "
    "units go on: hadal rollout --model OLD restores the old weights."
)
def test_a_rollout_stops_at_a_new_unit_that_does_not_come_up_and_a_second_one_heals_it() -> None:
    driver = RollingOut(1, 3)
    (first,) = driver.fleet.table.in_state(UnitState.DRAINING)
    driver.goes_on(0.0, 0.0)
    driver.down(first.name)
    for _ in range(4):
        driver.down(first.name)
        driver.now_s += BACKOFF_MAX_S
        driver.tell(Tick())
    assert driver.fleet.num_failed == 4
    assert (driver.fleet.num_unreplaced, driver.states().count("up")) == (3, 2)
    assert first.state is UnitState.STARTING
    assert stops(driver.tell(Rollout())) == [first.name], "the next rollout replaces it, too"
    assert driver.fleet.num_failed == 0
    assert starts(driver.down(first.name)) == [first.name], "at once"
    driver.up(first.name)
    assert [driver.replace() for _ in range(3)]
    assert (driver.fleet.num_unreplaced, driver.fleet.num_failed) == (0, 0)


def test_a_rollout_is_over_when_the_last_new_unit_is_up_and_not_while_it_fails() -> None:
    driver = RollingOut(1, 1)
    driver.replace()
    (last,) = driver.fleet.table.in_state(UnitState.DRAINING)
    driver.goes_on(0.0, 0.0)
    driver.down(last.name)
    assert (last.state, driver.fleet.num_unreplaced) == (UnitState.STARTING, 1)
    driver.down(last.name)
    assert (last.state, driver.fleet.num_failed) == (UnitState.STOPPED, 1)
    assert driver.fleet.num_unreplaced == 1
    driver.now_s += BACKOFF_S
    driver.tell(Tick())
    driver.up(last.name)
    assert (driver.fleet.num_unreplaced, driver.fleet.num_failed) == (0, 0)


def test_free_nodes_take_the_new_unit_before_the_old_one_has_ended() -> None:
    driver = Driver().at_floor()
    driver.held = {"decode-0": 1}
    effects = driver.tell(Rollout())
    assert driver.states()[:2] == ["draining", "starting"]
    assert starts(effects) == ["decode-1"]
    driver.up("decode-1")
    assert driver.states("prefill")[0] == "up", "one after the other"
    driver.held = {}
    assert stops(driver.goes_on(0.0, 0.0)) == ["decode-0"]
    driver.down("decode-0")
    assert driver.states()[:2] == ["stopped", "up"]
    assert driver.states("prefill")[:2] == ["draining", "starting"]


def test_one_that_dies_in_a_rollout_is_replaced_by_that() -> None:
    driver = RollingOut(1, 2)
    (first,) = driver.fleet.table.in_state(UnitState.DRAINING)
    (other,) = (u for u in driver.fleet.table.in_state(UnitState.UP) if u.role == "decode")
    assert other.name in starts(driver.down(other.name))
    assert not other.is_old
    driver.up(other.name)
    assert driver.replace() == first.name
    assert driver.replace() == "prefill-0"
    assert driver.fleet.num_unreplaced == 0

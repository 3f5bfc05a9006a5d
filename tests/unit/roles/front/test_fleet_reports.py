"""Test how the front drains a unit: no new work; requests end there or move at the deadline."""

from __future__ import annotations

import pytest

from hadal.core.balance import AUTO, OFF
from hadal.core.config import Deployment, FleetConfig, LimitsConfig
from hadal.core.messages.fleet import Demand, DrainUnit, KeepUnit
from hadal.core.messages.generation import Deliver, Token
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import (
    Cancel,
    Decode,
    FrontUp,
    KvLease,
    Prefill,
    PrefillDone,
    Pulled,
    Release,
    Tokens,
    UnitDown,
    UnitReport,
    UnitUp,
)
from hadal.core.seams import Effect, Send, Tick
from hadal.roles.front.front import Front
from tests.columns import tokens_message
from tests.unit.roles.driving import finals, generation, of, sent, to

LEASE = KvLease("pool", (1,), (0,), 10)


def front(*, mode: str = AUTO, slots: int = 4, max_queued: int = 512) -> Front:
    """Return a front with two units of each role, all up."""
    made = Front(
        Deployment(
            fleet=FleetConfig(mode, prefill_max=2, decode_max=2),
            limits=LimitsConfig(max_queued=max_queued),
            unit_timeout_s=1000.0,
        ),
        epoch="f1",
        max_context=1000,
    )
    for index in range(2):
        made.handle(0.0, UnitUp(f"prefill-{index}", "prefill", f"p{index}", 20, slots))
        made.handle(0.0, UnitUp(f"decode-{index}", "decode", f"d{index}", 20, slots))
    return made


def decoding(made: Front, name: str, now_s: float = 0.0) -> str:
    """Bring a request to decode; return its decode unit."""
    (effect,) = to(made.handle(now_s, Submit(generation(name, max_tokens=9))), Prefill)
    effects = made.handle(now_s, PrefillDone(effect, Token(name, 0, 0, 50), LEASE))
    (effect,) = to(effects, Decode)
    made.handle(now_s, Pulled(effect, name, 0))
    return effect


def token(made: Front, unit: str, name: str, finish: str | None = None) -> Tokens:
    """Return the message with a request's second token."""
    attempt_id = made.requests.running.attempt_id_of(made.requests.by_id[name])
    return tokens_message(unit, [(attempt_id, 1, 61, finish)])


def demand(made: Front, now_s: float) -> Demand:
    (said,) = sent(made.handle(now_s, Tick()), Demand)
    return said


def held(made: Front, now_s: float) -> dict[str, tuple[int, int]]:
    return {
        facts.unit: (facts.drain_number, facts.num_requests) for facts in demand(made, now_s).units
    }


def ok(made: Front) -> None:
    assert made.check() == []


@pytest.mark.promise("A draining unit gets no new requests and finishes its running ones")
def test_nothing_new_goes_to_a_draining_unit() -> None:
    made = front()
    for unit in ("prefill-0", "decode-0"):
        assert of(made.handle(0.0, DrainUnit(unit, 60.0, 1)), Send) == []
    assert {decoding(made, f"r{index}") for index in range(3)} == {"decode-1"}
    assert [view.unit for view in made.units.prefill_views("")] == ["prefill-1"]
    made.handle(0.0, KeepUnit("decode-0"))
    assert decoding(made, "r3") == "decode-0"
    ok(made)


@pytest.mark.promise("A draining unit gets no new requests and finishes its running ones")
def test_what_it_holds_ends_there() -> None:
    made = front()
    unit = decoding(made, "a")
    made.handle(0.0, DrainUnit(unit, 60.0, 7))
    assert held(made, 1.0)[unit] == (7, 1)
    effects = made.handle(30.0, token(made, unit, "a", "length"))
    assert finals(effects) == [("a", None)]
    assert held(made, 31.0)[unit] == (7, 0)
    ok(made)


def test_at_the_deadline_the_rest_goes_on_elsewhere_and_nothing_is_lost() -> None:
    made = front()
    unit = decoding(made, "a")
    made.handle(0.0, token(made, unit, "a"))
    made.handle(1.0, DrainUnit(unit, 60.0, 1))
    made.handle(2.0, DrainUnit(unit, 600.0, 2))  # The deadline of a repeated drain does not count.
    assert sent(made.handle(60.0, Tick()), Cancel) == []
    effects = made.handle(61.0, Tick())
    assert to(effects, Cancel) == [unit]
    (prefill,) = sent(effects, Prefill)
    assert prefill.generation.output == (50, 61)
    assert made.requests.by_id["a"].num_retries == 0
    assert held(made, 62.0)[unit] == (2, 0)
    ok(made)
    sender = made.requests.by_id["a"].prefill_unit
    effects = made.handle(63.0, PrefillDone(str(sender), Token("a", 1, 2, 62), LEASE))
    assert [d.tokens[0].index for d in of(effects, Deliver)] == [2]
    assert to(effects, Decode) != [unit]
    ok(made)


def test_a_prefill_unit_holds_leased_kv_until_it_was_pulled() -> None:
    made = front()
    (effect,) = to(made.handle(0.0, Submit(generation())), Prefill)
    made.handle(0.0, DrainUnit(effect, 60.0, 3))
    assert held(made, 1.0)[effect] == (3, 1)
    (decode,) = to(made.handle(1.1, PrefillDone(effect, Token("a", 0, 0, 50), LEASE)), Decode)
    assert held(made, 2.0)[effect] == (3, 1)
    made.handle(2.1, Pulled(decode, "a", 0))
    assert held(made, 3.0)[effect] == (3, 0)
    ok(made)


def test_a_prefill_unit_past_its_deadline_lets_go_of_what_is_being_pulled() -> None:
    made = front()
    (effect,) = to(made.handle(0.0, Submit(generation())), Prefill)
    made.handle(0.0, PrefillDone(effect, Token("a", 0, 0, 50), LEASE))
    made.handle(0.0, DrainUnit(effect, 5.0, 3))
    effects = made.handle(5.0, Tick())
    assert to(effects, Release) == [effect]
    assert len(sent(effects, Prefill)) == 1
    assert made.requests.by_id["a"].prefill_unit != effect
    ok(made)


def test_a_draining_unit_leaves_the_others_their_room() -> None:
    """Requests of a draining unit take slots of that unit, not of the open ones."""
    made = front(slots=2)
    units = [decoding(made, f"r{index}") for index in range(4)]
    assert sorted(units) == ["decode-0", "decode-0", "decode-1", "decode-1"]
    made.handle(0.0, DrainUnit("decode-0", 60.0, 1))
    first = units.index("decode-1")
    made.handle(0.0, token(made, "decode-1", f"r{first}", "stop"))
    assert decoding(made, "more") == "decode-1"
    ok(made)


def test_with_every_unit_draining_requests_wait() -> None:
    made = front()
    for unit in ("prefill-0", "prefill-1"):
        made.handle(0.0, DrainUnit(unit, 60.0, 1))
    assert sent(made.handle(0.0, Submit(generation())), Prefill) == []
    assert demand(made, 1.0).tokens_waiting == 10
    assert len(sent(made.handle(1.0, KeepUnit("prefill-1")), Prefill)) == 1
    ok(made)


def test_a_unit_that_dies_while_it_drains_is_forgotten_and_its_next_life_is_open() -> None:
    made = front()
    unit = decoding(made, "a")
    made.handle(0.0, DrainUnit(unit, 60.0, 1))
    made.handle(1.0, UnitDown(unit, "killed"))
    made.handle(2.0, UnitUp(unit, "decode", "again", 20, 4))
    assert held(made, 3.0)[unit][0] == 0
    made.handle(4.0, DrainUnit("nobody", 1.0, 1))
    made.handle(4.0, KeepUnit("nobody"))
    ok(made)


def test_demand_says_all_there_is_at_every_beat() -> None:
    made = front(slots=1, max_queued=1)
    first = demand(made, 0.0)
    found = (first.tokens_in, first.tokens_out, first.tokens_waiting, first.outputs_waiting)
    assert found == (0, 0, 0, 0)
    assert sent(made.handle(0.1, Tick()), Demand) == []  # The next report waits for a heartbeat.
    for index in range(2):
        unit = decoding(made, f"r{index}")
    made.handle(0.2, token(made, unit, "r1", "stop"))
    said = demand(made, 1.0)
    assert (said.tokens_in, said.tokens_out, said.tokens_waiting) == (20, 3, 0)
    made.handle(1.0, UnitReport(unit, f"d{unit[-1]}", 20, 0, 1, 1, 0, step_ms=20.0))
    made.handle(1.0, UnitReport("prefill-0", "p0", 20, 0, 1, 1, 0, num_ranks=2, token_s=1e-4))
    rates = {facts.unit: facts.tokens_per_s_max for facts in demand(made, 2.0).units}
    assert rates[unit] == pytest.approx(50.0)
    assert rates["prefill-0"] == pytest.approx(20_000.0)
    assert sorted(rates.values())[:2] == [0.0, 0.0]


def test_what_is_refused_for_want_of_room_was_asked_for() -> None:
    made = front(slots=1, max_queued=1)
    refusals: list[Effect] = []
    for index in range(12):
        refusals += [
            d for d in of(made.handle(0.0, Submit(generation(f"r{index}"))), Deliver) if d.final
        ]
    assert refusals
    assert demand(made, 1.0).tokens_in == 120


def test_a_unit_that_comes_up_hears_of_the_front_before_it_is_given_anything() -> None:
    """A unit drops all requests at a front's first message (FrontUp). After a late message of the
    unit's previous process, the front once sent FrontUp after requests, which then hung (swarm seed
    326).
    """
    made = Front(Deployment(), epoch="f1", max_context=1000)
    made.handle(0.0, Submit(generation()))
    made.handle(0.1, UnitUp("decode-0", "decode", "d1", 20, 4))
    effects = made.handle(0.1, UnitUp("prefill-0", "prefill", "p2", 20, 4))
    assert [type(effect.message) for effect in of(effects, Send)] == [FrontUp, Prefill]
    # The unit's answer to FrontUp.
    assert sent(made.handle(0.2, UnitUp("prefill-0", "prefill", "p2", 20, 4)), FrontUp) == []


def test_without_a_fleet_to_follow_a_drain_is_told_from_its_beginning_to_its_end() -> None:
    made = front(mode=OFF)

    def told(now_s: float) -> list[int]:
        """Return the drain's number in each report."""
        reports = sent(made.handle(now_s, Tick()), Demand)
        return [next(u for u in r.units if u.unit == "decode-0").drain_number for r in reports]

    assert [told(now_s) for now_s in (1.0, 2.0, 3.0)] == [[], [], []]
    made.handle(3.1, DrainUnit("decode-0", 60.0, 7))
    assert [told(now_s) for now_s in (4.0, 5.0)] == [[7], [7]]
    made.handle(5.1, KeepUnit("decode-0"))
    assert [told(now_s) for now_s in (6.0, 7.0, 8.0)] == [[0], [], []]

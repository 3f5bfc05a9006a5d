"""Causes in recordings: messages, steps in a row, copies, timers, and outside events."""

from __future__ import annotations

from hadal.core.config import Deployment
from hadal.core.messages import Cancel, FrontUp, KvLease, Pulled, Release, UnitReport
from hadal.core.plans import Formed, FormPlan, KvPulled, PrefillPlan, Staged, StagePlan, StepDone
from hadal.core.seams import (
    BlocksRead,
    Execute,
    Form,
    Pull,
    ReadBlocks,
    Send,
    Stage,
    StoreBlocks,
    Tick,
    WakeAt,
)
from hadal.roles.recording import VERSION, AnyEffect, AnyEvent, Call, MadeFleet, Opening, Recording
from hadal.sim.replay.relived import Consequence, key_of, link

MS = 1_000_000


def recording(process: str, *calls: tuple[int, list[AnyEvent], list[AnyEffect]]) -> Recording:
    """Calls at whole milliseconds."""
    opening = Opening(VERSION, "run", process, MadeFleet(0.0), Deployment(model="m"))
    return Recording(
        opening, tuple(Call(ms * MS / 1e9, tuple(heard), tuple(did)) for ms, heard, did in calls)
    )


def done(step_id: int) -> StepDone:
    return StepDone(step_id, (), (), {}, 0.001)


def step(step_id: int) -> Execute:
    return Execute((PrefillPlan(step_id, ()),))


def test_messages_are_found_by_what_they_say() -> None:
    """In the order of sending, also equal ones; those that nobody heard are lost."""
    a, b = Release("a", 0), Release("b", 0)
    front = recording(
        "front", (1, [], [Send("p", a), Send("p", b)]), (2, [], [Send("p", a), Send("q", a)])
    )
    unit = recording("p", (0, [], []), (4, [a], []), (5, [b, a], []))
    links = link([front, unit])
    assert links.effect_to_consequence == {
        (0, 0): Consequence(1, 1, 0, 3 * MS),
        (0, 1): Consequence(1, 2, 0, 4 * MS),
        (0, 2): Consequence(1, 2, 1, 3 * MS),
    }
    assert (links.outside, links.num_lost) == ([], 1)


def test_a_message_is_not_heard_before_it_is_said() -> None:
    front = recording("front", (5, [], [Send("p", Cancel("a", 0))]))
    unit = recording("p", (0, [], []), (4, [Cancel("a", 0)], []))
    links = link([front, unit])
    assert (links.outside, links.num_lost) == ([(1, 1, 0)], 1)


def test_the_second_process_of_a_name_hears_what_was_said_to_it() -> None:
    front = recording(
        "front", (1, [], [Send("p", FrontUp("e"))]), (6, [], [Send("p", FrontUp("f"))])
    )
    first = recording("p", (0, [], []), (2, [FrontUp("e")], []))
    second = recording("p", (5, [], []), (7, [FrontUp("f")], []))
    links = link([front, first, second])
    found = links.effect_to_consequence
    assert found == {(0, 0): Consequence(1, 1, 0, MS), (0, 1): Consequence(2, 1, 0, MS)}


def test_the_host_adds_to_a_load_on_its_way() -> None:
    load = UnitReport("p", "e", 1, 0, 0, 1, 0)
    sent = recording("p", (0, [], [Send("front", load)]))
    heard = UnitReport("p", "e", 1, 0, 0, 1, 0, overhead_ms=1.5)
    links = link([sent, recording("front", (3, [heard], []))])
    assert links.effect_to_consequence == {(0, 0): Consequence(1, 0, 0, 3 * MS)}


def test_a_step_begins_when_the_one_before_it_is_over() -> None:
    unit = recording(
        "p",
        (0, [], [step(0), step(1)]),
        (10, [done(0)], [step(2)]),
        (14, [done(1), Pulled("p", "x", 0)], []),
        (15, [done(2)], []),
        (40, [done(7)], []),
    )
    links = link([unit])
    assert links.effect_to_consequence == {
        (0, 0): Consequence(0, 1, 0, 10 * MS),
        (0, 1): Consequence(0, 2, 0, 4 * MS),
        (0, 2): Consequence(0, 3, 0, 1 * MS),
    }
    assert links.outside == [(0, 2, 1), (0, 4, 0)]


def test_a_timer_that_was_set_anew_never_rang() -> None:
    unit = recording(
        "p",
        (0, [], [WakeAt(0.010)]),
        (5, [done(0)], [WakeAt(0.020)]),
        (23, [Tick()], []),
        (24, [Tick()], []),
    )
    links = link([unit])
    assert links.effect_to_consequence == {(0, 1): Consequence(0, 2, 0, 3 * MS)}
    assert links.outside == [(0, 1, 0), (0, 3, 0)]


def test_asked_and_answered() -> None:
    lease = KvLease("pool", (1,), (0,), 64)
    pairs: list[tuple[AnyEffect, AnyEvent]] = [
        (Pull("a", 1, lease, (2,)), KvPulled("a", 1, None)),
        (ReadBlocks(3, b"", (), ()), BlocksRead(3, 0)),
        (Form(FormPlan(2, 1, (), b"", 0)), Formed(2, None)),
        (Stage(StagePlan(2, 5, 0, (), ())), Staged(2, 5, 0)),
        (step(4), done(4)),
    ]
    keys = [key_of(effect) for effect, _ in pairs]
    assert keys == [key_of(event) for _, event in pairs]
    assert len(set(keys)) == len(keys)
    assert key_of(StoreBlocks(3, b"", (), ())) != key_of(ReadBlocks(3, b"", (), ()))
    assert key_of(Tick()) is None
    unit = recording(
        "p", (0, [], [effect for effect, _ in pairs]), (9, [event for _, event in pairs], [])
    )
    links = link([unit])
    assert links.outside == []
    # The step was asked for while the unit formed, so it began when that was over.
    delays = [links.effect_to_consequence[0, number].delay_ns for number in range(len(pairs))]
    assert delays == [9 * MS] * 4 + [0]

"""A simulated process: simultaneous events arrive together; effects are answered in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hadal.core.messages.generation import Deliver
from hadal.core.messages.pools import Freed, Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.units import Cancel, KvLease, Release
from hadal.core.plans import BlocksRead, BlocksStored, KvPulled, PrefillPlan, StepDone
from hadal.core.seams import Effect, Event, Execute, RankReset, Send, Tick, WakeAt
from hadal.lab.sim.world.clock import SimClock
from hadal.lab.sim.world.process import Asked, Process


class Scripted:
    """Role that records its events and answers with the next effects of its script."""

    def __init__(self, *script: list[Effect]) -> None:
        self.script = list(script)
        self.given: list[tuple[float, tuple[Event, ...]]] = []

    def start(self, now_s: float) -> list[Effect]:
        return self.script.pop(0) if self.script else []

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        self.given.append((round(now_s, 9), events))
        return self.script.pop(0) if self.script else []


class Steps:
    def run(self, plans: Any) -> StepDone:
        return StepDone(plans[0].step_id, (), (), {}, 0.25)


class Around:
    """World that records messages, and answers each kind of effect after its delay."""

    def __init__(self, **answers: tuple[float, Event]) -> None:
        self.answers = answers
        self.sent: list[Any] = []
        self.delivered: list[Deliver] = []

    def send(self, to: str, message: Any) -> None:
        self.sent.append((to, message))

    def deliver(self, effect: Deliver) -> None:
        self.delivered.append(effect)

    def ask(self, name: str, effect: Asked) -> tuple[float, Callable[[], Event]]:
        delay_s, answer = self.answers[type(effect).__name__]
        return delay_s, lambda: answer


def process(
    role: Scripted, around: Around | None = None, look_s: float = 0.0, **options: Any
) -> tuple[Process, SimClock]:
    clock = SimClock()
    made = Process("p", role, clock, around or Around(), look_s=look_s, **options)
    made.start()
    return made, clock


def test_what_arrives_within_a_look_is_handed_over_together() -> None:
    role = Scripted()
    made, clock = process(role, look_s=0.1)
    a, b, c = (Release(name, 0) for name in "abc")
    for at_s, message in ((0.0, a), (0.05, b), (0.3, c)):
        clock.at(at_s, lambda message=message: made.post(message))  # type: ignore[misc]
    clock.run(1.0)
    assert role.given == [(0.1, (a, b)), (0.4, (c,))]
    assert made.num_events == 3


def test_steps_run_one_behind_the_other() -> None:
    plans = [(PrefillPlan(number, ()),) for number in range(3)]
    role = Scripted([Execute(plans[0]), Execute(plans[1])], [Execute(plans[2])])
    made, clock = process(role, runner=Steps())
    clock.run(2.0)
    assert [(at_s, event.step_id) for at_s, (event,) in role.given] == [
        (0.25, 0),
        (0.5, 1),
        (0.75, 2),
    ]  # type: ignore[union-attr]
    assert made.num_steps == 3


def test_three_plans_at_once_are_a_bug() -> None:
    role = Scripted([Execute((PrefillPlan(number, ()),)) for number in range(3)])
    with pytest.raises(AssertionError, match="too many plans"):
        process(role, runner=Steps())


def test_messages_copies_and_streams() -> None:
    lease = KvLease("pool", (1,), (0,), 10)
    role = Scripted(
        [Send("front", Cancel("a", 0)), Pull("a", 2, lease, (3,)), Deliver("a", ()), Freed((1,))]
    )
    around = Around(Pull=(0.5, KvPulled("a", 2, None)))
    _, clock = process(role, around)
    clock.run(1.0)
    assert (around.sent, around.delivered) == ([("front", Cancel("a", 0))], [Deliver("a", ())])
    assert role.given == [(0.5, (KvPulled("a", 2, None),))]


def test_the_last_alarm_counts() -> None:
    role = Scripted([WakeAt(0.2), WakeAt(0.4)])
    _, clock = process(role)
    clock.run(1.0)
    assert role.given == [(0.4, (Tick(),))]


def test_what_nobody_can_do_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no runner"):
        process(Scripted([Execute((PrefillPlan(0, ()),))]))


def test_a_rank_that_dies_answers_nothing_and_breaks_off_the_steps() -> None:
    pulls = [
        Pull(name, 0, KvLease("x", (1,), (0,), 64), (2,), rank) for rank, name in enumerate("ab")
    ]
    plans = [(PrefillPlan(number, ()),) for number in range(2)]
    role = Scripted([Execute(plans[0]), *pulls], [*pulls, Execute(plans[1])])
    answer = KvPulled("a", 0, "gone")
    made, clock = process(role, Around(Pull=(0.2, answer)), runner=Steps())
    clock.at(0.1, lambda: made.break_off((1,)))
    reset = RankReset((1,), ())
    clock.at(0.5, lambda: made.form(reset))
    clock.run(1.0)
    # Rank 1 dies at 0.1 s, so the step that would end at 0.25 s never does. At 0.2 s the living
    # rank answers; the step that the role plans then is dropped too.
    assert role.given == [(0.2, (answer,)), (0.4, (answer,)), (0.5, (reset,))]


def test_a_process_that_ended_hears_nothing() -> None:
    role = Scripted([WakeAt(0.5)])
    made, clock = process(role, look_s=0.1)
    made.post(Release("a", 0))
    clock.at(0.05, made.end)
    clock.at(0.2, lambda: made.post(Release("b", 0)))
    clock.run(1.0)
    assert role.given == []


def test_the_disk_answers_in_its_time() -> None:
    loaded, stored = BlocksRead(3, 1), BlocksStored(4, (None,))
    role = Scripted([ReadBlocks(3, b"", (), (1,)), StoreBlocks(4, b"", (0,), (1,))])
    _, clock = process(role, Around(ReadBlocks=(0.3, loaded), StoreBlocks=(0.2, stored)))
    clock.run(1.0)
    assert role.given == [(0.2, (stored,)), (0.3, (loaded,))]

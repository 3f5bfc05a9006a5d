"""Test clocks that differ: step messages measure the offset, and traces use one clock."""

from __future__ import annotations

import itertools
from random import Random

import msgspec
import pytest

from hadal.core.messages.questions import Trace, TracedStep
from hadal.core.messages.ranks import RankDone, RankForm, RankStep, RankUp
from hadal.core.messages.units import Cancel, FrontUp
from hadal.core.placement import spread
from hadal.core.plans import DecodePlan, Formed, StepDone, TraceEvent
from hadal.core.seams import Effect, Event, Execute, Send
from hadal.roles.ranks.clocks import DRIFT, HostClocks
from hadal.roles.ranks.membership import UnitMembership
from hadal.roles.ranks.rank import RankRole
from hadal.roles.ranks.ranks import RankedLeader
from tests.fresh import fresh
from tests.unit.roles.driving import sent

SEEDS = [1, 2, fresh().randrange(1 << 30)]
AHEAD_S = {"10.0.0.1": 0.0, "10.0.0.2": 86_400.25, "10.0.0.3": -7_000.5}
"""Clock offset by host: clocks count from the start of their host."""
FASTEST_S, SLOWEST_S = 50e-6, 0.02
STEP_S = 0.030


class Inner:
    """Leader that plans a traced step for each FrontUp, and answers Cancel with the trace of all."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.step_id = -1
        self.steps: list[TracedStep] = []

    def start(self, now_s: float) -> list[Effect]:
        return []

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        match event:
            case StepDone():
                self.steps.append(TracedStep(event.step_id, "sequential", 1, 1, event.events))
            case Cancel():
                return [Send("front", self.trace())]
            case FrontUp():
                self.step_id += 1
                plan = DecodePlan(self.step_id, (), (), (), is_traced=True)
                return [Execute((plan,) * self.num_ranks)]
        return []

    def trace(self) -> Trace:
        return Trace("decode-0", 1, tuple(self.steps))


class Hosts:
    """Leader and ranks on hosts with different clocks. Each message takes a random time between
    FASTEST_S and SLOWEST_S. `now_s` is the leader's time.
    """

    def __init__(self, hosts: list[str], seed: int) -> None:
        self.random = Random(seed)
        self.hosts = hosts
        self.inner = Inner(len(hosts))
        membership = UnitMembership("decode-0", len(hosts), spread(1, 12, len(hosts)))
        self.leader = RankedLeader("decode-0", self.inner, membership)
        self.now_s = 1000.0
        self.true: dict[tuple[int, int], tuple[float, float]] = {}
        """(step, rank) -> (start, end) of its computation, by the leader's clock."""
        self.leader.start(self.now_s)
        self.ranks = [
            RankRole(RankUp("decode-0", rank, f"e{rank}", host, 1, f"pool-{rank}"))
            for rank, host in enumerate(hosts)
        ]
        effects: list[Effect] = []
        for rank, role in enumerate(self.ranks):
            for up in [e.message for e in role.start(self.at(rank)) if isinstance(e, Send)][-1:]:
                effects += self.leader.handle(self.now_s, up)
        (plan,) = {form.plan for form in sent(effects, RankForm)}
        for rank, role in enumerate(self.ranks):
            role.handle(self.at(rank), RankForm(plan))
            for effect in role.handle(self.at(rank), Formed(plan.formation, None)):
                assert isinstance(effect, Send)
                self.leader.handle(self.now_s, effect.message)

    def at(self, rank: int, now_s: float | None = None) -> float:
        return (self.now_s if now_s is None else now_s) + AHEAD_S[self.hosts[rank]]

    def wire_s(self) -> float:
        return FASTEST_S + (SLOWEST_S - FASTEST_S) * self.random.random() ** 4

    def step(self) -> None:
        self.now_s += 0.2
        asked_s = self.now_s
        effects = self.leader.handle(asked_s, FrontUp("f"))
        answers: list[tuple[float, RankDone]] = []
        messages = [e for e in effects if isinstance(e, Send) and isinstance(e.message, RankStep)]
        for rank, effect in enumerate(messages):
            assert effect.to == f"decode-0.{rank}"
            taken_s = asked_s + self.wire_s()
            begin_s = taken_s + self.random.uniform(0, 0.001)
            end_s = begin_s + STEP_S
            step_id = self.inner.step_id
            self.true[step_id, rank] = begin_s, end_s
            event = TraceEvent(
                0, "compute", "step", 0, 0, self.at(rank, begin_s), self.at(rank, end_s)
            )
            done = StepDone(step_id, (), (), {}, STEP_S, events=(event,))
            role = self.ranks[rank]
            role.handle(self.at(rank, taken_s), effect.message)
            (answer,) = sent(role.handle(self.at(rank, end_s), done), RankDone)
            answers.append((end_s + self.wire_s(), answer))
        for heard_s, answer in sorted(answers, key=lambda one: one[0]):
            self.now_s = heard_s
            self.leader.handle(heard_s, answer)

    def trace(self) -> Trace:
        (trace,) = sent(self.leader.handle(self.now_s, Cancel("a", 0)), Trace)
        return trace


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trace_of_several_hosts_is_told_in_one_time(seed: int) -> None:
    scene = Hosts(["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3"], seed)
    for _ in range(12):
        scene.step()
    trace = scene.trace()
    found = [(clock.host, clock.ranks) for clock in trace.clocks]
    assert found == [("10.0.0.1", (0, 1)), ("10.0.0.2", (2,)), ("10.0.0.3", (3,))]
    for clock in trace.clocks:
        assert abs(clock.offset_s - AHEAD_S[clock.host]) <= clock.error_s < SLOWEST_S / 2
    rank_to_error_s = {rank: clock.error_s for clock in trace.clocks for rank in clock.ranks}
    moved: dict[int, set[float]] = {}
    for step in trace.steps:
        assert [event.rank for event in step.events] == [0, 1, 2, 3]
        for event in step.events:
            begin_s, end_s = scene.true[step.step_id, event.rank]
            assert abs(event.start_s - begin_s) <= rank_to_error_s[event.rank] + 1e-9
            assert event.end_s - event.start_s == pytest.approx(end_s - begin_s, abs=1e-9)
            moved.setdefault(event.rank, set()).add(round(event.start_s - begin_s, 8))
    # All steps of a host are shifted alike; otherwise its lanes would overlap.
    assert {rank: len(by_s) for rank, by_s in moved.items()} == dict.fromkeys(range(4), 1)
    assert moved[0] == moved[1], "one host's lanes stay in line"


def test_times_of_one_host_stay_as_they_are() -> None:
    scene = Hosts(["10.0.0.2", "10.0.0.2"], 1)
    scene.step()
    trace = scene.trace()
    assert (trace, trace.clocks) == (scene.inner.trace(), ())


def test_a_rank_that_is_gone_was_where_it_was() -> None:
    """A lost rank's last steps are converted from its own host's time, even if its number is reused."""
    scene = Hosts(["10.0.0.1", "10.0.0.2"], 1)
    scene.step()
    scene.leader.membership._processes[1].up = None
    for event in scene.trace().steps[0].events:
        assert abs(event.start_s - scene.true[0, event.rank][0]) <= SLOWEST_S


def done(taken_s: float, answered_s: float) -> RankDone:
    return RankDone(0, "e", 1, StepDone(0, (), (), {}, 0.0), (), taken_s, answered_s)


def clock_of(clocks: HostClocks, now_s: float) -> tuple[float, float]:
    """Return (offset, error) of host "h" in seconds; the unit's other host is the leader's."""
    clocks.traced(0, {0: "h", 1: "here"})
    step = TracedStep(0, "sequential", 1, 1, (TraceEvent(0, "compute", "step", 0, 0, 9.0, 9.5),))
    (clock,) = clocks.aligned(now_s, Trace("u", 1, (step,))).clocks
    return clock.offset_s, clock.error_s


def test_the_quickest_answer_counts_until_it_is_old() -> None:
    clocks = HostClocks()
    clocks.measure(1.010, "h", 1.0, done(51.009, 51.009))  # 9 ms there, 1 ms back: off by 4 ms.
    assert clock_of(clocks, 1.010) == pytest.approx((50.004, 0.005))
    clocks.measure(2.002, "h", 2.0, done(52.001, 52.001))
    assert clock_of(clocks, 2.002) == pytest.approx((50.0, 0.001))
    clocks.measure(3.010, "h", 3.0, done(53.009, 53.009))
    assert clock_of(clocks, 3.010)[0] == pytest.approx(50.0), "a slow one says less"
    later_s = 3.0 + 0.006 / DRIFT
    clocks.measure(later_s + 0.010, "h", later_s, done(later_s + 50.009, later_s + 50.009))
    assert clock_of(clocks, later_s + 0.010) == pytest.approx((50.004, 0.005)), "clocks drift"


def test_a_host_that_was_started_again_has_another_clock() -> None:
    clocks = HostClocks()
    clocks.measure(1.0002, "h", 1.0, done(51.0001, 51.0001))
    clocks.measure(2.010, "h", 2.0, done(7.005, 7.005))
    assert clock_of(clocks, 2.010) == pytest.approx((5.0, 0.005))


def test_what_cannot_be_is_no_sample() -> None:
    """An answer is no sample if it took longer than the round trip, or has no times."""
    clocks = HostClocks()
    clocks.measure(1.01, "h", 1.0, done(51.0, 51.5))
    clocks.traced(0, {0: "h", 1: "here"})
    trace = Trace("u", 1, (TracedStep(0, "sequential", 1, 1, ()),))
    assert clocks.aligned(1.01, trace).clocks == ()


def test_steps_that_no_trace_takes_are_forgotten() -> None:
    clocks = HostClocks()
    for step_id in range(10_000):
        clocks.traced(step_id, {0: "h"})
    assert len(clocks._step_to_hosts) < 10_000
    assert list(itertools.islice(reversed(clocks._step_to_hosts), 1)) == [9_999]


def test_an_answer_of_before_there_were_times_is_read() -> None:
    old = msgspec.msgpack.encode(("RankDone", 0, "e", 1, done(0.0, 0.0).done, ()))
    assert msgspec.msgpack.decode(old, type=RankDone) == done(0.0, 0.0)

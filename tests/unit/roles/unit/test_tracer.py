"""Test Tracer: the right steps, one request after another, nothing lost when steps are void."""

from __future__ import annotations

import pytest
from msgspec import structs

from hadal.core.messages.questions import Trace, TraceRequest
from hadal.core.plans import LinkBytes
from hadal.roles.unit.tracing import REQUESTS_MAX, Tracer
from tests.unit.roles.driving import done, sent


def test_steps_go_to_the_oldest_request() -> None:
    tracer = Tracer("decode-0")
    assert not tracer.is_wanted
    assert (
        tracer.ask(0.0, TraceRequest(1, 1, 10.0)) == tracer.ask(0.0, TraceRequest(2, 1, 10.0)) == []
    )
    for step in (5, 6):
        assert tracer.is_wanted
        tracer.planned(step, "sequential", 1, 3)
    assert not tracer.is_wanted
    assert tracer.done(done(4)) == []
    (first,) = sent(tracer.done(done(5)), Trace)
    (second,) = sent(tracer.done(done(6)), Trace)
    found = [(t.reply_id, [s.step_id for s in t.steps]) for t in (first, second)]
    assert found == [(1, [5]), (2, [6])]


def test_void_steps_are_recorded_again() -> None:
    tracer = Tracer("decode-0")
    tracer.ask(0.0, TraceRequest(1, 2, 10.0))
    tracer.planned(0, "sequential", 1, 3)
    tracer.done(done(0))
    tracer.planned(1, "sequential", 1, 3)
    tracer.reset()
    assert tracer.is_wanted
    tracer.planned(2, "sequential", 1, 3)
    (trace,) = sent(tracer.done(done(2)), Trace)
    assert [step.step_id for step in trace.steps] == [0, 2]


def test_nothing_and_too_much_are_answered_at_once() -> None:
    tracer = Tracer("decode-0")
    assert sent(tracer.ask(0.0, TraceRequest(1, 0, 10.0)), Trace) == [Trace("decode-0", 1, ())]
    for number in range(REQUESTS_MAX):
        assert tracer.ask(0.0, TraceRequest(number, 1, 10.0)) == []
    assert sent(tracer.ask(0.0, TraceRequest(99, 1, 10.0)), Trace) == [Trace("decode-0", 99, ())]


def test_who_gave_up_keeps_no_place() -> None:
    tracer = Tracer("decode-0")
    for number in range(REQUESTS_MAX):
        assert tracer.ask(float(number), TraceRequest(number, 1, 2.0)) == []
    assert tracer.ask(9.5, TraceRequest(99, 1, 2.0)) == []
    tracer.planned(0, "sequential", 1, 3)
    (trace,) = sent(tracer.done(done(0)), Trace)
    assert trace.reply_id == 99


@pytest.mark.promise(
    "Every objective is a gauge, mean over maximum of the ranks (core/balance), and "
    "is part of every traced step."
)
def test_a_step_says_how_its_ranks_were_balanced() -> None:
    tracer = Tracer("decode-0")
    tracer.ask(0.0, TraceRequest(1, 2, 10.0))
    tracer.planned(0, "sequential", 1, 3, {"kv": 0.5})
    tracer.planned(1, "sequential", 1, 3)
    tracer.done(done(0))
    (trace,) = sent(tracer.done(done(1)), Trace)
    assert [step.balance for step in trace.steps] == [{"kv": 0.5}, {}]


def test_a_step_says_what_travelled() -> None:
    tracer = Tracer("decode-0")
    tracer.ask(0.0, TraceRequest(1, 1, 10.0))
    tracer.planned(0, "sequential", 1, 8)
    link_bytes = LinkBytes((1, 2), (3, 4))
    (trace,) = sent(tracer.done(structs.replace(done(0), link_bytes=link_bytes)), Trace)
    assert trace.steps[0].link_bytes == link_bytes

"""Test PrefillLeader by hand: chunks, pipelining, leases, and every way an attempt can end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hadal.core.errors import InvariantError
from hadal.core.messages.pools import Freed
from hadal.core.messages.questions import Audit, AuditRequest, Trace, TraceRequest
from hadal.core.messages.units import (
    FrontUp,
    Prefill,
    PrefillDone,
    Release,
    Returned,
    Tokens,
    UnitReport,
    UnitUp,
)
from hadal.core.plans import Draw, LinkBytes, Sampling, StepDone
from hadal.core.seams import Effect, Send, Tick, WakeAt
from tests.unit.roles.driving import (
    done,
    generation,
    of,
    prefill,
    prefill_leader,
    prefill_plans,
    sent,
)


def test_start_says_that_it_is_up_without_the_scratch_block() -> None:
    effects = prefill_leader().start(0.0)
    up = UnitUp("prefill-0", "prefill", "e1", 8, 4, 8)
    assert of(effects, Send)[:2] == [Send("front", up), Send("supervisor", up)]
    assert of(effects, WakeAt) == [WakeAt(0.5)]


def test_it_says_whose_kv_it_makes_and_takes_no_attempt_at_another() -> None:
    unit = prefill_leader(fingerprint="f")
    (up, _) = sent(unit.start(0.0), UnitUp)
    assert up.fingerprint == "f"
    prompt = generation("a", 10)
    for fingerprint, answers in (
        ("g", [Returned("prefill-0", "a", 0, "other weights")]),
        ("f", []),
    ):
        asked = Prefill(msgspec.structs.replace(prompt, fingerprint=fingerprint))
        assert sent(unit.handle(0.0, asked), Returned) == answers


def test_a_short_prompt_is_one_chunk_then_a_lease() -> None:
    unit = prefill_leader()
    (plan,) = prefill_plans(unit.handle(0.0, prefill(prompt=10)))
    (chunk,) = plan.chunks
    found = (chunk.start, len(chunk.tokens), len(chunk.block_ids), chunk.output_index)
    assert found == (0, 10, 1, 0)
    assert chunk.sampling == Sampling()
    (answer,) = sent(unit.handle(0.1, done(plan.step_id, {0: 7})), PrefillDone)
    assert (answer.token.token, answer.token.index, answer.token.finish) == (7, 0, None)
    assert answer.lease is not None
    found = (answer.lease.source, answer.lease.num_tokens, answer.lease.block_ids)
    assert found == ("pool", 10, chunk.block_ids)
    assert unit.audit() == []


def test_tokens_that_are_left_are_counted_while_prompts_come_and_go() -> None:
    unit = prefill_leader(heartbeat_s=0.0)

    def num_left(effects: list[Effect]) -> int:
        (load,) = sent(effects, UnitReport)
        assert unit.audit() == []
        return load.num_tokens_waiting

    assert num_left(unit.handle(0.0, prefill("a", 200))) == 200 - 2 * 64
    assert num_left(unit.handle(0.1, prefill("b", 30))) == 72 + 30
    assert num_left(unit.handle(0.2, prefill("b", 30))) == 72 + 30, "the same message twice"
    assert num_left(unit.handle(0.3, Release("b", 0))) == 72
    assert num_left(unit.handle(0.4, done(0))) == 72 - 64


def test_a_long_prompt_is_cut_and_planned_ahead() -> None:
    unit = prefill_leader()
    first, second = prefill_plans(unit.handle(0.0, prefill(prompt=150)))
    found = [
        (p.chunks[0].start, len(p.chunks[0].tokens), len(p.chunks[0].block_ids))
        for p in (first, second)
    ]
    assert found == [(0, 64, 1), (64, 64, 2)]
    assert first.chunks[0].sampling is None
    (third,) = prefill_plans(unit.handle(0.1, done(first.step_id)))
    found = (third.chunks[0].start, len(third.chunks[0].tokens), third.chunks[0].sampling)
    assert found == (128, 22, Sampling())
    assert unit.handle(0.2, done(second.step_id)) is not None
    assert len(sent(unit.handle(0.3, done(third.step_id, {0: 1})), PrefillDone)) == 1


def test_the_rest_of_a_step_goes_to_the_next_prompt() -> None:
    unit = prefill_leader()
    for name in "ab":  # Fill the pipeline.
        unit.handle(0.0, prefill(name, 10))
    unit.handle(0.0, prefill("c", 50))
    unit.handle(0.0, prefill("d", 50))
    (plan,) = prefill_plans(unit.handle(0.1, done(0, {0: 1})))
    found = [(chunk.request_id, len(chunk.tokens)) for chunk in plan.chunks]
    assert found == [("c", 50), ("d", 14)]


def test_tenants_take_turns() -> None:
    """Only the begun prompts of one tenant are ahead of another tenant's first prompt."""
    unit = prefill_leader()
    for name in ("a0", "a1", "a2", "a3", "b0"):  # The first two fill the pipeline.
        unit.handle(0.0, Prefill(msgspec.structs.replace(generation(name, 64), tenant=name[0])))
    begun = [
        prefill_plans(unit.handle(0.1, done(step, {0: 1})))[0].chunks[0].request_id
        for step in range(3)
    ]
    assert begun == ["b0", "a2", "a3"]


def test_a_retry_prefills_what_was_streamed_and_draws_the_next_token() -> None:
    unit = prefill_leader()
    (plan,) = prefill_plans(unit.handle(0.0, prefill(prompt=10, output=3, attempt=2)))
    (chunk,) = plan.chunks
    assert (len(chunk.tokens), chunk.output_index) == (13, 3)
    (answer,) = sent(unit.handle(0.1, done(0, {0: 9})), PrefillDone)
    assert (answer.token.index, answer.token.attempt) == (3, 2)


def test_history_goes_with_the_last_chunk_if_a_penalty_is_on() -> None:
    unit = prefill_leader()
    request = generation(prompt=70, output=2, sampling=Sampling(presence_penalty=1.0))
    first, last = prefill_plans(unit.handle(0.0, Prefill(request)))
    assert first.chunks[0].prompt == ()
    assert (last.chunks[0].prompt, last.chunks[0].output) == (request.prompt, request.output)


@pytest.mark.parametrize(
    ("options", "finish"), [({"max_tokens": 1}, "length"), ({"stop_ids": (7,)}, "stop")]
)
def test_a_first_token_that_ends_it_needs_no_lease(options: dict[str, Any], finish: str) -> None:
    unit = prefill_leader()
    unit.handle(0.0, prefill(**options))
    effects = unit.handle(0.1, done(0, {0: 7}))
    (answer,) = sent(effects, PrefillDone)
    assert (answer.token.finish, answer.lease) == (finish, None)
    assert len(of(effects, Freed)) == 1
    assert unit.blocks.num_used == 0


def test_release_frees_and_says_so() -> None:
    unit = prefill_leader()
    unit.handle(0.0, prefill(prompt=100))
    unit.handle(0.1, done(0))
    (answer,) = sent(unit.handle(0.1, done(1, {0: 7})), PrefillDone)
    assert answer.lease is not None
    effects = unit.handle(0.2, Release("a", 0))
    assert set(of(effects, Freed)[0].block_ids) == set(answer.lease.block_ids)
    assert unit.blocks[0].versions(answer.lease.block_ids) == (1, 1)
    assert of(unit.handle(0.2, Release("a", 0)), Freed) == []


def test_blocks_of_a_cancelled_prompt_are_freed_after_the_last_plan_that_writes_them() -> None:
    unit = prefill_leader()
    unit.handle(0.0, prefill(prompt=100))  # Two plans in flight.
    assert of(unit.handle(0.0, Release("a", 0)), Freed) == []
    assert of(unit.handle(0.1, done(0)), Freed) == []
    effects = unit.handle(0.2, done(1, {0: 3}))
    assert len(of(effects, Freed)[0].block_ids) == 2
    assert sent(effects, PrefillDone) == []


def test_a_cancelled_prompt_that_waits_just_goes() -> None:
    unit = prefill_leader()
    for name in "abc":
        unit.handle(0.0, prefill(name))
    unit.handle(0.0, Release("c", 0))
    assert prefill_plans(unit.handle(0.1, done(0, {0: 1}))) == []


def test_a_lease_ends_at_its_deadline() -> None:
    unit = prefill_leader(heartbeat_s=60.0)
    unit.handle(0.0, prefill())
    effects = unit.handle(1.0, done(0, {0: 1}))
    assert of(effects, WakeAt)[-1] == WakeAt(3.0)
    assert sent(unit.handle(2.9, Tick()), Returned) == []
    effects = unit.handle(3.0, Tick())
    assert sent(effects, Returned) == [Returned("prefill-0", "a", 0, "lease expired")]
    assert len(of(effects, Freed)) == 1


def test_a_prompt_waits_for_blocks_and_nobody_overtakes() -> None:
    unit = prefill_leader(num_blocks=4, chunk_tokens=512)
    unit.handle(0.0, prefill("a", 150))  # "a" takes all three blocks.
    assert prefill_plans(unit.handle(0.0, prefill("b", 70))) == []
    assert prefill_plans(unit.handle(0.0, prefill("c", 1))) == []
    unit.handle(0.1, done(0, {0: 1}))
    (plan,) = prefill_plans(unit.handle(0.2, Release("a", 0)))
    assert [chunk.request_id for chunk in plan.chunks] == ["b", "c"]


def test_what_can_never_fit_is_given_back_at_once() -> None:
    (returned,) = sent(prefill_leader(num_blocks=3).handle(0.0, prefill(prompt=129)), Returned)
    assert returned.reason.startswith("too long: 129")


def test_a_full_queue_gives_back() -> None:
    unit = prefill_leader(num_blocks=2, num_requests_max=1, num_waiting_max=1)
    effects = [unit.handle(0.0, prefill(name)) for name in "abcd"]
    assert [len(sent(each, Returned)) for each in effects] == [0, 0, 0, 1]
    assert sent(effects[-1], Returned)[0].reason == "queue full"


def test_logprobs_come_by_row_of_the_step() -> None:
    """Log-probabilities are not ordered by chunk: rows are in any order, and one of them is void."""
    unit, asked = prefill_leader(chunk_tokens=100), Sampling(num_logprobs=0)
    for name, prompt in (("x", 1), ("y", 1), ("a", 150), ("b", 10), ("c", 10)):
        unit.handle(0.0, Prefill(generation(name, prompt, sampling=asked)))
    unit.handle(0.1, done(0, {0: 5}))
    (plan,) = prefill_plans(unit.handle(0.2, done(1, {0: 5})))
    assert [chunk.request_id for chunk in plan.chunks] == ["a", "b", "c"]
    unit.handle(0.3, done(2))
    draws = {row: Draw(-float(row), ((7, -1.0),)) for row in range(3)}
    step = StepDone(plan.step_id, (1, 0, 2), (6, 7, 8), draws, 0.01, None, {0: "not finite"})
    tokens = [answer.token for answer in sent(unit.handle(0.4, step), PrefillDone)]
    assert [(token.request_id, token.token) for token in tokens] == [("b", 6), ("c", 8)]
    found = [(token.logprob, token.top) for token in tokens]
    assert found == [(draws[row].logprob, draws[row].top) for row in (0, 2)]


def test_a_failed_step_gives_its_prompts_back_and_the_next_plan_frees_them() -> None:
    unit = prefill_leader()
    unit.handle(0.0, prefill(prompt=100))
    effects = unit.handle(0.1, done(0, error="out of memory"))
    assert sent(effects, Returned) == [Returned("prefill-0", "a", 0, "step failed: out of memory")]
    assert of(effects, Freed) == []
    assert len(of(unit.handle(0.2, done(1, {0: 5})), Freed)) == 1
    assert unit.audit() == []


def test_one_void_token_gives_back_its_prompt_alone() -> None:
    unit = prefill_leader()
    unit.handle(0.0, prefill("a"))
    unit.handle(0.0, prefill("b"))
    effects = unit.handle(0.1, done(0, {0: 5}, failed={0: "not finite"}))
    assert sent(effects, Returned) == [Returned("prefill-0", "a", 0, "not finite")]
    assert len(of(effects, Freed)) == 1
    assert [
        answer.token.request_id for answer in sent(unit.handle(0.2, done(1, {0: 6})), PrefillDone)
    ] == ["b"]
    assert unit.audit() == []


def test_the_same_message_twice_is_one_request() -> None:
    unit = prefill_leader()
    unit.handle(0.0, prefill())
    unit.handle(0.0, prefill())
    assert unit.num_requests == 1
    unit.handle(0.1, done(0, {0: 1}))
    unit.handle(0.1, prefill())
    assert unit.num_requests == 1


@pytest.mark.promise(
    "Its first message (FrontUp, a new epoch) makes the leaders free all blocks and "
    "slots of the earlier front."
)
def test_a_new_front_finds_nothing_left() -> None:
    unit = prefill_leader()
    unit.handle(0.0, FrontUp("f1"))
    unit.handle(0.0, prefill("a"))
    unit.handle(0.1, done(0, {0: 1}))  # Leased.
    unit.handle(0.1, TraceRequest(1, 3, 10.0))
    unit.handle(0.1, prefill("b"))  # In flight.
    assert of(unit.handle(0.2, FrontUp("f1")), Freed) == []  # The same front again.
    effects = unit.handle(0.2, FrontUp("f2"))
    assert len(of(effects, Freed)[0].block_ids) == 1
    assert len(sent(effects, UnitUp)) == 2  # Front and supervisor.
    assert sent(unit.handle(0.2, TraceRequest(1, 1, 10.0)), Trace) == []
    assert sent(unit.handle(0.3, done(1, {0: 1})), Trace) == []
    assert (unit.blocks.num_used, unit.num_requests) == (0, 0)
    unit.handle(0.3, prefill("c"))
    (trace,) = sent(unit.handle(0.4, done(2, {0: 1})), Trace)
    assert [step.step_id for step in trace.steps] == [2]


def test_load_counts_what_waits_and_beats() -> None:
    unit = prefill_leader()
    unit.start(0.0)
    load = sent(unit.handle(0.0, prefill(prompt=200)), UnitReport)[-1]
    assert (load.num_tokens_waiting, load.num_blocks_used, load.num_requests) == (72, 4, 1)
    assert sent(unit.handle(0.1, Tick()), UnitReport) == []
    assert len(sent(unit.handle(0.6, Tick()), UnitReport)) == 1


def test_audit_answers_and_sees_a_leak() -> None:
    unit = prefill_leader()
    unit.handle(0.0, prefill())
    assert sent(unit.handle(0.0, AuditRequest(5)), Audit) == [Audit("prefill-0", 5, 1, 1, ())]
    unit.blocks[0].allocate(1, "nobody")
    assert unit.audit()


def test_wrong_results_are_a_bug() -> None:
    unit = prefill_leader()
    unit.handle(0.0, prefill())
    with pytest.raises(InvariantError, match="expected one for each of"):
        unit.handle(0.1, done(0))
    with pytest.raises(InvariantError, match="not the one that runs"):
        unit.handle(0.1, done(7))
    with pytest.raises(InvariantError, match="cannot handle Tokens"):
        unit.handle(0.1, Tokens("decode-0", b"", b"", b""))


def test_what_travelled_is_reported() -> None:
    unit = prefill_leader()
    unit.start(0.0)
    (plan,) = prefill_plans(unit.handle(0.0, prefill("a", 10)))
    step = msgspec.structs.replace(done(plan.step_id, {0: 7}), link_bytes=LinkBytes((1, 2), (3, 4)))
    (load,) = sent(unit.handle(0.6, step), UnitReport)
    assert load.link_bytes == LinkBytes((1, 2), (3, 4))

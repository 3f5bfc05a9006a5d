"""Test DecodeLeader by hand: two plans in flight, ends, growth, preemption, failures."""

from __future__ import annotations

from typing import Any

import pytest

from hadal.core.errors import InvariantError
from hadal.core.messages.pools import Freed, Pull
from hadal.core.messages.questions import Audit, AuditRequest, Trace, TraceRequest
from hadal.core.messages.units import Cancel, FrontUp, Prefill, Pulled, Returned, Tokens, UnitUp
from hadal.core.plans import DecodePlan, Draw, Grammar, KvPulled, Sampling, StepDone
from hadal.core.seams import Effect, RankReset, Send
from hadal.policy.drafts import DraftChooser
from hadal.policy.passes import PASSES_MAX
from hadal.roles.decode.leader import DecodeLeader
from tests.columns import key_of, rows_of
from tests.unit.roles.driving import decode, decode_leader, decode_plans, done, generation, of, sent


def occupant(unit: DecodeLeader, name: str, **options: Any) -> list[DecodePlan]:
    """Admit a request and complete its pull; return the plans that result."""
    effects = unit.handle(0.0, decode(name, **options))
    assert len(of(effects, Pull)) == 1
    return decode_plans(unit.handle(0.0, KvPulled(name, options.get("attempt", 0), None)))


def drawn(effects: list[Effect]) -> list[tuple[str, int, int, str | None]]:
    return [
        (key_of(row[0])[0], *row[1:])
        for message in sent(effects, Tokens)
        for row in rows_of(message)
    ]


def test_start_says_that_it_is_up() -> None:
    up = UnitUp("decode-0", "decode", "e1", 16, 4, 16)
    assert of(decode_leader().start(0.0), Send)[:2] == [Send("front", up), Send("supervisor", up)]


def test_kv_is_pulled_then_two_plans_go_out() -> None:
    unit = decode_leader()
    (pull,) = of(unit.handle(0.0, decode(prompt=64)), Pull)
    assert len(pull.into) == 1
    effects = unit.handle(0.1, KvPulled("a", 0, None))
    assert sent(effects, Pulled) == [Pulled("decode-0", "a", 0)]
    first, second = decode_plans(effects)
    (join,) = first.joins
    found = (join.num_tokens, join.last_token, join.output_index, len(join.block_ids))
    assert found == (64, 0, 1, 2)
    assert (second.leaves, second.joins, second.grown) == ((), (), ())


def test_a_join_is_as_pulled_until_a_token_of_it_was_delivered() -> None:
    """A join of a void plan is sent again: the leader cannot tell if the Runner executed it."""
    unit = decode_leader()
    first, _ = occupant(unit, "a")
    reset = RankReset((), (), ("p",), 1)
    again, _ = decode_plans(unit.handle(0.1, reset))
    after, _ = decode_plans(
        [*unit.handle(0.2, done(again.step_id, {0: 5})), *unit.handle(0.3, reset)]
    )[-2:]
    assert [
        (join.is_pulled, join.num_tokens) for plan in (first, again, after) for join in plan.joins
    ] == [
        (True, first.joins[0].num_tokens),
        (True, first.joins[0].num_tokens),
        (False, first.joins[0].num_tokens + 1),
    ]


def test_tokens_of_a_step_go_to_the_front_in_one_message() -> None:
    unit = decode_leader()
    occupant(unit, "a")
    occupant(unit, "b")
    assert drawn(unit.handle(0.1, done(0, {0: 5}))) == [("a", 1, 5, None)]
    unit.handle(0.2, done(1, {0: 6}))
    effects = unit.handle(0.3, done(2, {1: 8, 0: 7}))  # Slots in any order.
    assert sorted(drawn(effects)) == [("a", 3, 7, None), ("b", 1, 8, None)]
    assert len(sent(effects, Tokens)) == 1


def test_logprobs_are_passed_on() -> None:
    unit = decode_leader()
    occupant(unit, "a")
    (message,) = sent(
        unit.handle(0.1, StepDone(0, (0,), (5,), {0: Draw(-1.5, ((5, -1.5),))}, 0.01)), Tokens
    )
    assert message.draws == {0: Draw(-1.5, ((5, -1.5),))}


def test_logprobs_keep_their_row_when_one_before_it_is_void() -> None:
    """StepDone has log-probabilities by row of the step, Tokens has them by row of the message."""
    unit = decode_leader()
    for name in "abc":
        occupant(unit, name)
    unit.handle(0.1, done(0, {0: 5}))
    draws = {0: Draw(-1.0, ()), 1: Draw(-2.0, ()), 2: Draw(-3.0, ())}
    unit.handle(0.2, done(1, {0: 6}))
    step = StepDone(2, (1, 0, 2), (6, 7, 8), draws, 0.01, None, {1: "not finite"})
    (message,) = sent(unit.handle(0.3, step), Tokens)
    assert [(key_of(row[0])[0], row[2]) for row in rows_of(message)] == [("a", 7), ("c", 8)]
    assert message.draws == {0: draws[1], 1: draws[2]}


def test_an_end_by_count_is_left_out_in_time() -> None:
    unit = decode_leader()
    first, second = occupant(unit, "a", max_tokens=3)  # Index 0 came from prefill: two steps.
    assert drawn(unit.handle(0.1, done(first.step_id, {0: 5}))) == [("a", 1, 5, None)]
    effects = unit.handle(0.2, done(second.step_id, {0: 6}))
    assert drawn(effects) == [("a", 2, 6, "length")]
    assert decode_plans(effects) == []
    assert len(of(effects, Freed)) == 1
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)


def short(step_id: int, passes: int, first: int = 5, seconds: float = 0.0002) -> StepDone:
    """Return the result of a step of one slot with short passes."""
    return StepDone(
        step_id, (0,) * passes, tuple(range(first, first + passes)), {}, passes * seconds
    )


def in_short_passes() -> DecodeLeader:
    """Return a leader of one request with stop id 7; its plans have all passes from step 2 on."""
    unit = decode_leader()
    occupant(unit, "a", stop_ids=(7,), max_tokens=40)
    unit.handle(0.1, short(0, 1))
    unit.handle(0.2, short(1, 1))
    return unit


def test_a_plan_has_more_passes_where_they_are_short_and_ends_by_count_in_time() -> None:
    unit = decode_leader()
    plans = occupant(unit, "a", max_tokens=2 + 1 + PASSES_MAX + 3)
    assert [plan.num_passes for plan in plans] == [1, 1], "nobody knows yet what a pass takes"
    plans += decode_plans(unit.handle(0.1, short(0, 1)))
    assert plans[2].num_passes == PASSES_MAX
    effects = [*unit.handle(0.2, short(1, 1)), *unit.handle(0.3, short(2, PASSES_MAX, 20))]
    (last,) = decode_plans(effects)
    assert (last.num_passes, drawn(effects)[-1]) == (
        3,
        ("a", 2 + PASSES_MAX, 19 + PASSES_MAX, None),
    )
    assert drawn(unit.handle(0.4, short(3, 3, 40)))[-1][3] == "length"
    assert unit.audit() == []


def test_a_step_that_ended_early_is_not_taken_for_a_quick_one() -> None:
    """The rank made one pass of eight, and none in the next step."""
    unit = in_short_passes()
    line, passes = unit._passes.line, unit._passes.mean_s
    effects = unit.handle(0.3, StepDone(2, (0,), (7,), {}, 0.0002))
    assert drawn(effects)[-1][3] == "stop"
    unit.handle(0.4, StepDone(3, (), (), {}, 0.0))
    assert (unit._passes.line, unit._passes.mean_s) == (line, passes)
    assert unit.audit() == []


def test_tokens_behind_a_stop_id_in_a_plan_are_dropped() -> None:
    unit = in_short_passes()
    effects = unit.handle(0.3, short(2, PASSES_MAX, 5))
    assert [row[2:] for row in drawn(effects)] == [(5, None), (6, None), (7, "stop")]
    unit.handle(0.4, short(3, PASSES_MAX))
    assert unit.audit() == []


def test_a_unit_that_forms_anew_goes_back_by_all_passes_in_flight() -> None:
    unit = decode_leader()
    occupant(unit, "a", max_tokens=40)
    unit.handle(0.1, short(0, 1))
    unit.handle(0.2, short(1, 1))
    again, _ = decode_plans(unit.handle(0.3, RankReset((), (), ("p",), 1)))
    (join,) = again.joins
    assert (join.output_index, join.last_token) == (3, 5)
    assert unit.audit() == []


def test_after_a_stop_id_one_token_is_dropped_and_blocks_wait_for_the_plan_in_flight() -> None:
    unit = decode_leader()
    occupant(unit, "a", stop_ids=(9,), max_tokens=50)
    effects = unit.handle(0.1, done(0, {0: 9}))
    assert drawn(effects) == [("a", 1, 9, "stop")]
    assert of(effects, Freed) == []
    effects = unit.handle(0.2, done(1, {0: 4}))
    assert drawn(effects) == []
    assert len(of(effects, Freed)) == 1
    # The Runner still lists the slot. The next plan removes it, and uses the slot again.
    (plan, _) = occupant(unit, "b")
    assert (plan.leaves, plan.joins[0].slot) == ((0,), 0)


def test_a_stop_id_counts_from_min_tokens_on() -> None:
    unit = decode_leader()
    occupant(unit, "a", stop_ids=(9,), min_tokens=2, max_tokens=50)
    assert drawn(unit.handle(0.1, done(0, {0: 9}))) == [("a", 1, 9, None)]
    assert drawn(unit.handle(0.2, done(1, {0: 9}))) == [("a", 2, 9, "stop")]


def test_slots_keep_their_own_stop_ids() -> None:
    unit = decode_leader()
    occupant(unit, "a", stop_ids=(1,), max_tokens=50)
    occupant(unit, "b", stop_ids=(2, 3), max_tokens=50)
    unit.handle(0.1, done(0, {0: 2}))
    unit.handle(0.2, done(1, {0: 3}))
    found = drawn(unit.handle(0.3, done(2, {0: 2, 1: 3})))
    assert found == [("a", 3, 2, None), ("b", 1, 3, "stop")]


def test_a_block_is_added_when_the_position_needs_it() -> None:
    unit = decode_leader()
    first, second = occupant(unit, "a", prompt=62, max_tokens=50)  # Writes position 62, then 63.
    assert (first.grown, second.grown) == ((), ())
    (third,) = decode_plans(unit.handle(0.1, done(0, {0: 1})))
    ((slot, position, block),) = third.grown
    assert (slot, position) == (0, 1)
    assert unit.table.blocks_of(0)[1] == block


def test_history_goes_with_the_join_if_a_penalty_is_on() -> None:
    unit = decode_leader()
    (plan, _) = occupant(unit, "a", sampling=Sampling(frequency_penalty=1.0))
    assert (plan.joins[0].prompt, plan.joins[0].output) == (generation("a").prompt, (0,))


def test_a_grammar_brings_the_output_along() -> None:
    unit = decode_leader()
    (plan, _) = occupant(unit, "a", sampling=Sampling(grammar=Grammar("", (1,))))
    assert (plan.joins[0].prompt, plan.joins[0].output) == ((), (0,))


def test_slots_and_headroom_limit_who_is_seated() -> None:
    unit = decode_leader(num_slots=2)
    assert [len(of(unit.handle(0.0, decode(name)), Pull)) for name in "abc"] == [1, 1, 0]
    unit = decode_leader(
        num_blocks=4
    )  # Three usable blocks: "b" leaves one free, "c" would leave none.
    assert [len(of(unit.handle(0.0, decode(name)), Pull)) for name in "abc"] == [1, 1, 0]


@pytest.mark.parametrize(("num_slots", "num_waiting_max"), [(1, 1), (2, 0)])
def test_a_full_queue_gives_back(num_slots: int, num_waiting_max: int) -> None:
    unit = decode_leader(num_slots=num_slots, num_waiting_max=num_waiting_max)
    replies = [sent(unit.handle(0.0, decode(name)), Returned) for name in "abc"]
    assert replies == [[], [], [Returned("decode-0", "c", 0, "queue full")]]


def test_seats_are_given_at_once_where_none_may_be_queued() -> None:
    unit = decode_leader(num_slots=2, num_waiting_max=0)
    found = sent(unit.handle(0.0, *map(decode, "abc")), Returned)
    assert found == [Returned("decode-0", "c", 0, "queue full")]


def test_a_free_seat_without_blocks_is_none() -> None:
    unit = decode_leader(num_blocks=4, num_slots=4, num_waiting_max=0)  # Blocks for two.
    replies = [sent(unit.handle(0.0, decode(name)), Returned) for name in "abcd"]
    # "c" waits; "d" finds the queue full.
    assert replies == [[], [], [], [Returned("decode-0", "d", 0, "queue full")]]


@pytest.mark.promise("The request is prefilled again elsewhere.")
def test_a_pull_that_failed_gives_back_and_frees() -> None:
    unit = decode_leader()
    unit.handle(0.0, decode())
    effects = unit.handle(0.1, KvPulled("a", 0, "void"))
    assert sent(effects, Returned) == [Returned("decode-0", "a", 0, "pull failed: void")]
    assert unit.blocks.num_used == 0


def test_what_can_never_fit_is_given_back() -> None:
    (returned,) = sent(
        decode_leader(num_blocks=2).handle(0.0, decode(prompt=60, max_tokens=10)), Returned
    )
    assert returned.reason.startswith("too long")


def test_a_lease_that_does_not_match_is_given_back() -> None:
    wrong = decode(prompt=10)
    (returned,) = sent(
        decode_leader().handle(0.0, type(wrong)(generation("a", 12, output=1), wrong.lease)),
        Returned,
    )
    assert returned.reason.startswith("pull failed: a lease on 10 tokens")


def test_cancel_while_pulling_waits_for_the_copy() -> None:
    unit = decode_leader()
    unit.handle(0.0, decode())
    assert of(unit.handle(0.0, Cancel("a", 0)), Freed) == []
    effects = unit.handle(0.1, KvPulled("a", 0, None))
    assert len(of(effects, Freed)) == 1
    assert sent(effects, Pulled) == sent(effects, Returned) == []


@pytest.mark.promise("Both units free its blocks within a second.")
def test_cancel_while_computed_waits_for_both_plans() -> None:
    unit = decode_leader()
    occupant(unit, "a", max_tokens=50)
    assert of(unit.handle(0.0, Cancel("a", 0)), Freed) == []
    assert of(unit.handle(0.1, done(0, {0: 1})), Freed) == []
    effects = unit.handle(0.2, done(1, {0: 1}))
    assert len(of(effects, Freed)) == 1
    assert drawn(effects) == []


def test_cancel_of_one_that_waits_or_is_unknown() -> None:
    unit = decode_leader(num_slots=1)
    for name in "ab":
        unit.handle(0.0, decode(name))
    unit.handle(0.0, Cancel("b", 0))
    unit.handle(0.0, Cancel("b", 1))
    unit.handle(0.0, Cancel("z", 0))
    assert unit.num_requests == 1


def starved(**options: Any) -> tuple[DecodeLeader, list[Effect]]:
    """Return a leader with all four blocks in use, and its last effects: "b" needs a block, so "c", the
    latest request, is preempted while a plan computes it.
    """
    unit = decode_leader(num_blocks=5, **options)
    occupant(unit, "a", prompt=62, max_tokens=70)
    for name, prompt in (("b", 63), ("c", 10)):
        occupant(unit, name, prompt=prompt, max_tokens=70)
    (plan,) = decode_plans(unit.handle(0.1, done(0, {0: 1})))
    assert (len(plan.joins), len(plan.grown), unit.blocks.num_free) == (2, 1, 0)
    return unit, unit.handle(0.2, done(1, {0: 1}))


@pytest.mark.promise(
    "The latest request of the tenant with the most blocks is preempted: the front "
    "requeues it, and it is prefilled again later."
)
def test_preemption_delivers_what_is_in_flight_then_gives_back_the_latest() -> None:
    unit, effects = starved()
    assert decode_plans(effects) == []  # The plan waits for c's block.
    effects = unit.handle(0.3, done(2, {0: 1, 1: 8, 2: 9}))
    assert drawn(effects) == [("a", 3, 1, None), ("b", 1, 8, None), ("c", 1, 9, None)]
    assert sent(effects, Returned) == [Returned("decode-0", "c", 0, "preempted")]
    plan = decode_plans(effects)[0]
    assert (plan.leaves, plan.grown[0][0]) == ((2,), 1)
    assert unit.audit() == []


def test_drafts_are_chosen_once_for_a_plan_that_waits_for_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial of a number of drafts counts its steps, so that number must be chosen once per step."""
    choose, chosen = DraftChooser.choose, []

    def counted(self: DraftChooser, num_requests: int) -> int:
        chosen.append(num_requests)
        return choose(self, num_requests)

    monkeypatch.setattr(DraftChooser, "choose", counted)
    unit, _ = starved()
    num_chosen = len(chosen)
    for step in range(20):
        assert decode_plans(unit.handle(0.2, Cancel(f"unknown{step}", 0))) == []
    assert len(chosen) == num_chosen
    plans = decode_plans(unit.handle(0.3, done(2, {0: 1, 1: 8, 2: 9})))
    assert plans
    assert len(chosen) <= num_chosen + len(plans)


def test_a_plan_checks_no_more_drafts_than_have_room() -> None:
    """The third step writes position 62 and the block ends with 63, so one of its two drafts has room."""

    def third_step(num_drawn: int) -> None:
        unit = decode_leader(drafts=2)
        occupant(unit, "a", prompt=60, max_tokens=4)
        for step_id in range(2):
            unit.handle(0.1, done(step_id, {0: 7}))
        unit.handle(0.2, StepDone(2, (0,) * num_drawn, (7,) * num_drawn, {}, 0.01))

    third_step(1)
    third_step(2)
    with pytest.raises(InvariantError, match="unlike its plan"):
        third_step(3)


def test_nobody_is_seated_while_a_plan_waits_for_blocks() -> None:
    unit, _ = starved()
    unit.handle(0.2, Cancel("a", 0))  # Its block is freed after the plan in flight.
    assert of(unit.handle(0.2, decode("d", prompt=1)), Pull) == []
    assert len(of(unit.handle(0.3, done(2, {0: 1, 1: 8, 2: 9})), Pull)) == 1


def test_one_preempted_while_its_kv_is_copied_goes_when_the_copy_is_done() -> None:
    unit = decode_leader(num_blocks=6)
    occupant(unit, "a", prompt=62, max_tokens=70)
    for name, prompt in (("b", 63), ("c", 63)):
        occupant(unit, name, prompt=prompt, max_tokens=70)
    assert len(of(unit.handle(0.0, decode("d", prompt=3)), Pull)) == 1
    unit.handle(0.1, done(0, {0: 1}))
    effects = unit.handle(0.2, done(1, {0: 1}))  # a has the last block; b and c need one each.
    assert (decode_plans(effects), of(effects, Freed)) == ([], [])
    effects = unit.handle(0.2, KvPulled("d", 0, None))
    assert sent(effects, Returned) == [Returned("decode-0", "d", 0, "preempted")]
    assert sent(effects, Pulled) == []
    assert unit.audit() == []


def test_one_that_needs_a_block_and_is_the_latest_goes_without_a_pause() -> None:
    unit = decode_leader(num_blocks=4)
    occupant(unit, "a", prompt=62, max_tokens=70)
    occupant(unit, "b", prompt=63, max_tokens=70)
    unit.handle(0.1, done(0, {0: 1}))
    (plan,) = decode_plans(unit.handle(0.2, done(1, {0: 1})))
    assert plan.leaves == (1,)


def test_a_failed_step_gives_everybody_back_and_empties_the_runner() -> None:
    unit = decode_leader()
    occupant(unit, "a", max_tokens=50)
    effects = unit.handle(0.1, done(0, error="a rank failed"))
    assert sent(effects, Returned) == [Returned("decode-0", "a", 0, "step failed: a rank failed")]
    assert drawn(unit.handle(0.2, done(1, {0: 3}))) == []
    assert unit.blocks.num_used == 0
    (plan, _) = occupant(unit, "b")
    assert plan.leaves == (0, 1, 2, 3)
    assert unit.audit() == []


def test_one_void_token_gives_back_its_request_alone() -> None:
    unit = decode_leader()
    occupant(unit, "a", max_tokens=50)
    unit.handle(0.1, done(0, {0: 3}))
    occupant(unit, "b", max_tokens=50)
    effects = unit.handle(0.2, done(1, {0: 3}))
    assert decode_plans(effects)[0].step_id == 3  # The first plan that computes b.
    unit.handle(0.3, done(2, {0: 4}))
    effects = unit.handle(0.4, done(3, {0: 5, 1: 6}, failed={1: "not finite"}))
    assert sent(effects, Returned) == [Returned("decode-0", "b", 0, "not finite")]
    assert drawn(effects) == [("a", 4, 5, None)]
    assert decode_plans(effects)[0].leaves == (1,)
    assert drawn(unit.handle(0.5, done(4, {0: 7, 1: 8}))) == [("a", 5, 7, None)]
    assert unit.num_requests == 1
    assert unit.audit() == []


@pytest.mark.promise(
    "Its first message (FrontUp, a new epoch) makes the leaders free all blocks and "
    "slots of the earlier front."
)
def test_a_new_front_finds_nothing_left() -> None:
    unit = decode_leader(num_slots=2)
    unit.handle(0.0, FrontUp("f1"))
    unit.handle(0.0, TraceRequest(1, 3, 10.0))
    occupant(unit, "a", max_tokens=50)  # Computed.
    unit.handle(0.0, decode("b"))  # Pulling.
    unit.handle(0.0, decode("c"))  # Waiting.
    assert len(sent(unit.handle(0.0, FrontUp("f2")), UnitUp)) == 2  # Front and supervisor.
    unit.handle(0.1, KvPulled("b", 0, None))
    unit.handle(0.1, done(0, {0: 1}))
    unit.handle(0.1, TraceRequest(1, 1, 10.0))
    assert drawn(unit.handle(0.2, done(1, {0: 1}))) == []
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)
    occupant(unit, "d", max_tokens=50)
    effects = [effect for step in (2, 3) for effect in unit.handle(0.3, done(step, {0: 1}))]
    assert [len(trace.steps) for trace in sent(effects, Trace)] == [1]


def test_the_same_message_twice_is_one_request() -> None:
    unit = decode_leader()
    unit.handle(0.0, decode())
    assert of(unit.handle(0.0, decode()), Pull) == []


def test_two_attempts_of_a_request_live_side_by_side() -> None:
    unit = decode_leader()
    occupant(unit, "a", max_tokens=50)
    unit.handle(0.0, Cancel("a", 0))
    assert len(of(unit.handle(0.0, decode("a", attempt=1)), Pull)) == 1
    assert unit.audit() == []


def test_audit_answers_and_sees_a_leak() -> None:
    unit = decode_leader()
    unit.handle(0.0, decode())
    assert sent(unit.handle(0.0, AuditRequest(3)), Audit) == [Audit("decode-0", 3, 1, 1, ())]
    unit.blocks[0].allocate(1, "nobody")
    assert unit.audit()


def test_wrong_results_are_a_bug() -> None:
    unit = decode_leader()
    occupant(unit, "a")
    with pytest.raises(InvariantError, match="not the one that runs"):
        unit.handle(0.1, done(4))
    with pytest.raises(InvariantError, match="unlike its plan"):
        unit.handle(0.1, done(0, {1: 5}))
    with pytest.raises(InvariantError, match="without a request"):
        unit.handle(0.1, KvPulled("z", 0, None))
    with pytest.raises(InvariantError, match="cannot handle Prefill"):
        unit.handle(0.1, Prefill(generation()))

"""Test the front by hand: a request's path, limits, retries, stale answers, units that start and end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hadal.core.config import Deployment, LimitsConfig
from hadal.core.errors import InvariantError
from hadal.core.messages.generation import Closing, Deliver, Generation, Token
from hadal.core.messages.requests import Quota, Quotas, RejectedEarly, Submit
from hadal.core.messages.units import (
    Cancel,
    Decode,
    Drain,
    FrontUp,
    KvLease,
    LeaderDown,
    Prefill,
    PrefillDone,
    Pulled,
    Release,
    Resume,
    Returned,
    Sighting,
    Suspect,
    Tokens,
    UnitDown,
    UnitReport,
    UnitUp,
)
from hadal.core.plans import NO_TOKEN, NOT_FINITE
from hadal.core.seams import Effect, Send, Tick, WakeAt
from hadal.policy.admission import NO_SPARE
from hadal.policy.batching import AGE_S
from hadal.policy.fairness import is_batch
from hadal.roles.front.front import Front
from hadal.roles.front.units import LAST_WORDS_S, ORPHAN_S
from tests.columns import tokens_message
from tests.unit.roles.driving import finals, generation, of, sent, to

LEASE = KvLease("pool", (1,), (0,), 10)


def front(*, units: bool = True, max_context: int = 1000, **limits: Any) -> Front:
    made = Front(
        Deployment(limits=LimitsConfig(**limits), unit_timeout_s=5.0),
        epoch="f1",
        max_context=max_context,
    )
    if units:
        made.handle(0.0, UnitUp("prefill-0", "prefill", "p1", 20, 4))
        made.handle(0.0, UnitUp("decode-0", "decode", "d1", 20, 4))
    return made


def first_token(
    name: str = "a", *, attempt: int = 0, index: int = 0, finish: str | None = None
) -> PrefillDone:
    return PrefillDone(
        "prefill-0", Token(name, attempt, index, 50, finish), None if finish else LEASE
    )


def tokens(made: Front, name: str, index: int, *, finish: str | None = None) -> Tokens:
    attempt_id = made.requests.running.attempt_id_of(made.requests.by_id[name])
    return tokens_message("decode-0", [(attempt_id, index, 60 + index, finish)])


def decoding(made: Front, name: str = "a", **options: Any) -> Front:
    made.handle(0.0, Submit(generation(name, **options)))
    made.handle(0.1, first_token(name))
    made.handle(0.2, Pulled("decode-0", name, 0))
    assert made.requests.by_id[name].state == "decoding"
    return made


def ok(made: Front) -> None:
    assert made.check() == []


def test_start_tells_every_unit_of_the_deployment() -> None:
    effects = front(units=False).start(0.0)
    assert of(effects, Send) == [Send("prefill-0", FrontUp("f1")), Send("decode-0", FrontUp("f1"))]
    assert len(of(effects, WakeAt)) == 1


def test_a_request_goes_all_the_way() -> None:
    made = front()
    (prefill,) = sent(made.handle(0.0, Submit(generation(max_tokens=3))), Prefill)
    assert prefill.generation.output == ()
    effects = made.handle(0.1, first_token())
    assert [(d.tokens[0].index, d.final) for d in of(effects, Deliver)] == [(0, False)]
    (decode,) = sent(effects, Decode)
    assert (decode.generation.output, decode.lease) == ((50,), LEASE)
    found = of(made.handle(0.2, Pulled("decode-0", "a", 0)), Send)
    assert found == [Send("prefill-0", Release("a", 0))]
    made.handle(0.3, tokens(made, "a", 1))
    ok(made)
    effects = made.handle(0.4, tokens(made, "a", 2, finish="length"))
    found = [(d.tokens[0].index, d.final, d.error) for d in of(effects, Deliver)]
    assert found == [(2, True, None)]
    assert made.idle
    assert (made.totals.finished, made.totals.tokens_in, made.totals.tokens_out) == (1, 10, 3)
    ok(made)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (f"{NO_TOKEN}: logit_bias leaves none", 422),
        (f"{NOT_FINITE}: its logits have infinite values", 422),
        ("too long: 99 tokens", 400),
    ],
)
def test_what_a_request_spoils_by_itself_is_not_tried_again(reason: str, status: int) -> None:
    made = decoding(front())
    (end,) = of(made.handle(0.3, Returned("decode-0", "a", 0, reason)), Deliver)
    assert (end.final, end.error_status) == (True, status)
    assert reason.partition(": ")[2] in (end.error or "")
    assert made.idle
    ok(made)


def of_tenant(name: str, tenant: str, **options: Any) -> Submit:
    # Batches call `refusal` first, once for all choices of a line.
    made = msgspec.structs.replace(generation(name, **options), tenant=tenant)
    return Submit(made, is_admitted=is_batch(tenant))


@pytest.mark.promise(
    "The tenant that causes the overload gets 429. A tenant that is alone may use all capacity."
)
def test_a_tenant_that_fills_the_queue_leaves_another_its_share() -> None:
    made = front(max_running=1, max_queued=6)
    for number in range(8):
        ended = finals(made.handle(0.0, of_tenant(f"a{number}", "a")))
        assert ended == ([("a7", 429)] if number == 7 else []), "one is placed and six wait"
    assert made.admission.refusal(0.0, "a", 1) is not None
    assert made.admission.refusal(0.0, "b", 3) is None
    assert made.admission.refusal(0.0, "b", 4) is not None, "its share of six is three"
    for number in range(3):
        assert finals(made.handle(0.0, of_tenant(f"b{number}", "b"))) == []
    assert finals(made.handle(0.0, of_tenant("b3", "b"))) == [("b3", 429)]
    ok(made)


def test_what_is_turned_away_before_it_is_submitted_is_asked_for_all_the_same() -> None:
    """The fleet grows with refused demand too, so gateways report what they refuse themselves."""
    made = front(max_running=1, max_queued=1)
    for number, prompt in enumerate((6, 10)):
        assert finals(made.handle(0.0, Submit(generation(f"a{number}", prompt=prompt)))) == []
    assert finals(made.handle(0.0, Submit(generation("a2", prompt=20)))) == [("a2", 429)]
    made.handle(0.0, RejectedEarly(2, 30))
    made.handle(0.0, RejectedEarly(1))
    assert (made.totals.submitted, made.totals.refused) == (6, 4)
    # A prompt that was not read counts with the mean length of the admitted ones: (6 + 10) / 2.
    assert made.totals.tokens_refused == 20 + 30 + 8
    assert made.fleet.demand().tokens_in == 16 + 58
    made.handle(0.0, Drain())
    made.handle(0.0, RejectedEarly(1, 5))
    assert (made.totals.refused, made.totals.tokens_refused) == (5, 58)
    ok(made)


def test_what_would_not_wait_needs_no_room_in_the_queue() -> None:
    made = front(max_queued=2)
    # Four slots, one prefilled ahead of them, and two in the queue.
    assert made.admission.refusal(0.0, "a", 7) is None
    assert made.admission.refusal(0.0, "a", 8) is not None
    made.handle(0.0, Drain())
    refusal = made.admission.refusal(0.0, "a", 1)
    assert refusal is not None
    assert refusal.status == 503


@pytest.mark.parametrize(
    "impossible", [generation(prompt=0), generation(prompt=1000), generation(max_tokens=0)]
)
def test_what_can_never_be_served_is_refused(impossible: Generation) -> None:
    made = front()
    assert finals(made.handle(0.0, Submit(impossible))) == [("a", 400)]
    assert made.idle


def test_a_prompt_larger_than_the_pools_is_refused_and_others_are_capped() -> None:
    made = front(max_context=10_000)
    assert finals(made.handle(0.0, Submit(generation(prompt=20 * 64 + 1)))) == [("a", 400)]
    (prefill,) = sent(
        made.handle(0.0, Submit(generation("b", 20 * 64 - 3, max_tokens=100))), Prefill
    )
    assert prefill.generation.max_tokens == 4
    (prefill,) = sent(
        front(max_context=50).handle(0.0, Submit(generation("c", 40, max_tokens=100))), Prefill
    )
    assert prefill.generation.max_tokens == 10


def test_an_id_in_use_is_a_bug() -> None:
    made = front()
    made.handle(0.0, Submit(generation()))
    with pytest.raises(InvariantError, match="in use"):
        made.handle(0.0, Submit(generation()))


def test_running_and_queue_are_bounded_and_the_queue_keeps_its_order() -> None:
    made = front(max_running=1, max_queued=2)
    replies = [made.handle(0.0, Submit(generation(name, max_tokens=1))) for name in "abcd"]
    assert [len(sent(reply, Prefill)) for reply in replies] == [1, 0, 0, 0]
    (refusal,) = of(replies[3], Deliver)
    assert (refusal.final, refusal.error_status) == (True, 429)
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1
    (prefill,) = sent(made.handle(0.1, first_token("a", finish="length")), Prefill)
    assert prefill.generation.request_id == "b"
    ok(made)


def test_what_another_front_let_in_is_not_refused() -> None:
    """The request continues from its tokens; the front before had admitted it."""
    made = front(max_running=1, max_queued=0)
    made.handle(0.0, Submit(generation("a")), Drain())
    goes_on = msgspec.structs.replace(generation("b"), output=(7, 8), attempt=1)
    assert finals(made.handle(0.1, Submit(goes_on, is_admitted=True))) == []
    assert finals(made.handle(0.1, Submit(generation("c")))) == [("c", 503)]
    (prefill,) = sent(made.handle(0.2, Cancel("a", -1)), Prefill)
    assert (prefill.generation.request_id, prefill.generation.output) == ("b", (7, 8))
    ok(made)


def test_requests_wait_for_units() -> None:
    made = front(units=False)
    assert sent(made.handle(0.0, Submit(generation())), Prefill) == []
    assert sent(made.handle(0.1, UnitUp("prefill-0", "prefill", "p1", 20, 4)), Prefill) == []
    assert len(sent(made.handle(0.2, UnitUp("decode-0", "decode", "d1", 20, 4)), Prefill)) == 1


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    made = front(units=False, request_timeout_s=10.0)
    made.handle(0.0, Submit(generation()))
    assert finals(made.handle(9.9, Tick())) == []
    assert finals(made.handle(10.0, Tick())) == [("a", 503)]
    made = decoding(front(request_timeout_s=4.0))
    effects = made.handle(4.0, Tick())
    assert finals(effects) == [("a", 504)]
    assert Send("decode-0", Cancel("a", 0)) in effects
    assert made.idle


def test_a_request_that_makes_tokens_runs_as_long_as_it_does() -> None:
    made = decoding(front(request_timeout_s=4.0), max_tokens=100)
    attempt_id = made.requests.running.attempt_id_of(made.requests.by_id["a"])
    for index in range(1, 15):
        now_s = 3.9 * index
        assert finals(made.handle(now_s, Tick())) == []
        made.handle(now_s, tokens_message("decode-0", [(attempt_id, index, 7, None)]))
    assert finals(made.handle(now_s + 3.9, Tick())) == []
    assert finals(made.handle(now_s + 4.0, Tick())) == [("a", 504)]
    assert made.idle


@pytest.mark.promise("Both units free its blocks within a second.")
def test_cancel_tells_the_units_that_hold_it() -> None:
    made = front()
    made.handle(0.0, Submit(generation()))
    effects = made.handle(0.0, Cancel("a", 0))
    assert of(effects, Send) == [Send("prefill-0", Release("a", 0))]
    assert finals(effects) == [("a", 499)]
    made.handle(0.0, Submit(generation("b")))
    made.handle(0.1, first_token("b"))
    effects = made.handle(0.2, Cancel("b", 0))
    found = of(effects, Send)
    assert found == [Send("prefill-0", Release("b", 0)), Send("decode-0", Cancel("b", 0))]
    assert made.handle(0.2, Cancel("b", 0)) == []
    ok(made)


def test_the_end_says_where_a_request_was_worked_on() -> None:
    """Requests may finish, be cancelled anywhere, or retry; a refused request was at no unit."""

    def closing(effects: list[Effect]) -> Closing | None:
        (end,) = [deliver for deliver in of(effects, Deliver) if deliver.final]
        return end.closing

    made = front(max_queued=0, max_running=1)
    made.handle(0.0, Submit(generation(max_tokens=1)))
    assert closing(made.handle(0.0, Submit(generation("refused")))) is None
    assert closing(made.handle(0.1, first_token(finish="length"))) == Closing("prefill-0", "", 0)
    made = decoding(front(), max_tokens=9)
    found = closing(made.handle(0.3, tokens(made, "a", 1, finish="stop")))
    assert found == Closing("prefill-0", "decode-0", 0)
    made = decoding(front())
    made.handle(0.3, Returned("decode-0", "a", 0, "preempted"))
    assert closing(made.handle(0.4, Cancel("a", -1))) == Closing("prefill-0", "", 1)
    waiting = front(units=False)
    waiting.handle(0.0, Submit(generation()))
    assert closing(waiting.handle(0.1, Cancel("a", -1))) == Closing("", "", 0)


@pytest.mark.promise(
    "Each attempt on that unit goes to RETRYING, is prefilled elsewhere with the "
    "tokens already streamed, and its stream continues."
)
def test_a_lost_decode_unit_costs_only_time() -> None:
    made = decoding(front(), max_tokens=9)
    made.handle(0.3, tokens(made, "a", 1))
    assert finals(made.handle(0.4, UnitDown("decode-0", "killed"))) == []
    (prefill,) = sent(made.handle(0.5, UnitUp("decode-0", "decode", "d2", 20, 4)), Prefill)
    assert (prefill.generation.attempt, prefill.generation.output) == (1, (50, 61))
    (answer,) = of(made.handle(0.6, first_token(attempt=1, index=2)), Deliver)
    assert answer.tokens[0].index == 2
    ok(made)


def test_a_lost_prefill_unit_takes_the_transfer_with_it() -> None:
    made = front()
    made.handle(0.0, Submit(generation()))
    made.handle(0.1, first_token())
    effects = made.handle(0.2, UnitDown("prefill-0", "killed"))
    assert of(effects, Send) == [Send("decode-0", Cancel("a", 0))]
    assert made.requests.by_id["a"].state == "queued"
    ok(made)


def test_a_new_epoch_means_the_old_one_is_gone() -> None:
    made = front()
    made.handle(0.0, Submit(generation()))
    (prefill,) = sent(made.handle(0.1, UnitUp("prefill-0", "prefill", "p2", 20, 4)), Prefill)
    assert prefill.generation.attempt == 1
    assert sent(made.handle(0.1, UnitUp("prefill-0", "prefill", "p2", 20, 4)), Prefill) == []


def test_a_load_of_an_unknown_life_is_asked_who_it_is() -> None:
    made = front()
    load = UnitReport("decode-0", "d9", 20, 0, 0, 4, 0)
    assert of(made.handle(0.1, load), Send) == [Send("decode-0", FrontUp("f1"))]
    assert made.units.by_name["decode-0"].epoch == "d1"


def listen(made: Front, from_s: float, to_s: float, *, waited_share: float) -> list[UnitDown]:
    """Let only prefill-0 report, while the other unit's host answers sightings; return UnitDowns."""
    downs: list[UnitDown] = []
    while from_s < to_s:
        from_s += 0.5
        made.handle(from_s, UnitReport("prefill-0", "p1", 20, 0, 0, 4, 0))
        effects = made.handle(from_s, Tick())
        for suspect in sent(effects, Suspect):
            made.handle(from_s, Sighting(suspect.process, waited_share * from_s, is_stopped=False))
        downs += sent(effects, UnitDown)
        ok(made)
    return downs


@pytest.mark.promise(
    "A leader's heartbeat is missing for unit_timeout_s, or a step exceeds its deadline: "
    "the process is ended"
)
def test_a_silent_unit_is_given_up() -> None:
    made = decoding(front())
    assert listen(made, 0.0, 5.0, waited_share=0.0) == []
    assert listen(made, 5.0, 5.5, waited_share=0.0) == [
        UnitDown("decode-0", "has sent no heartbeat for 5.5 s, 0% of it without a processor")
    ]
    assert made.requests.by_id["a"].state == "queued"


def test_a_unit_without_a_processor_is_not_frozen() -> None:
    made = decoding(front())
    assert listen(made, 0.0, 50.0, waited_share=0.9) == []
    assert made.requests.by_id["a"].state == "decoding"


def test_what_the_front_did_not_hear_while_it_stood_still_is_nobodys_silence() -> None:
    made = decoding(front())
    listen(made, 0.0, 1.0, waited_share=0.0)
    assert sent(made.handle(21.0, Tick()), UnitDown) == []
    assert made.requests.by_id["a"].state == "decoding"


def test_priority_passes_those_that_have_not_waited_much_longer() -> None:
    made = front(max_running=1)
    made.handle(0.0, Submit(generation("first")))
    for at_s, name, priority in (
        (1.0, "a", 0),
        (2.0, "b", 1),
        (3.0, "c", -1),
        (1.5 + AGE_S, "d", 1),
    ):
        request = msgspec.structs.replace(generation(name), priority=priority, arrived_s=99.0)
        made.handle(at_s, Submit(request))
    order = []
    now_s, name = 20.0, "first"
    while name:
        done = made.handle(now_s, first_token(name, finish="length"))
        placed = sent(done, Prefill)
        name = placed[0].generation.request_id if placed else ""
        order += [
            (m.generation.request_id, m.generation.arrived_s, m.generation.priority) for m in placed
        ]
        ok(made)
    assert order == [("b", 2.0, 1), ("a", 1.0, 0), ("d", 1.5 + AGE_S, 1), ("c", 3.0, -1)]


def test_a_retry_keeps_the_time_of_its_arrival() -> None:
    made = front()
    made.handle(3.0, Submit(generation()))
    (again,) = sent(made.handle(4.0, Returned("prefill-0", "a", 0, "rank lost")), Prefill)
    assert (again.generation.attempt, again.generation.arrived_s) == (1, 3.0)


def test_prefill_goes_to_the_unit_that_will_be_done_first() -> None:
    made = front()
    made.handle(0.0, UnitUp("prefill-1", "prefill", "p2", 20, 4))
    for name, token_s in (("prefill-0", 1e-3), ("prefill-1", 1e-4)):
        epoch = "p1" if name == "prefill-0" else "p2"
        made.handle(0.0, UnitReport(name, epoch, 20, 0, 0, 4, 0, token_s=token_s, pair_s=1e-9))
    # prefill-1 is 10x as fast: it finishes all three before prefill-0 would finish one.
    for name in "abc":
        assert to(made.handle(0.0, Submit(generation(name, 300))), Prefill) == ["prefill-1"]
    ok(made)


def test_preemption_does_not_count_and_other_returns_back_off_and_do() -> None:
    made = front(max_retries=1)
    made.handle(0.0, Submit(generation()))
    for attempt in range(3):
        made.handle(0.1, Returned("prefill-0", "a", attempt, "preempted"))
    assert made.totals.preemptions == 3
    effects = made.handle(0.2, Returned("prefill-0", "a", 3, "step failed: x"))
    assert sent(effects, Prefill) == []
    assert of(effects, WakeAt) == [WakeAt(pytest.approx(0.25))]
    assert len(sent(made.handle(0.26, Tick()), Prefill)) == 1
    effects = made.handle(0.3, Returned("prefill-0", "a", 4, "step failed: y"))
    assert finals(effects) == [("a", 503)]
    assert "step failed: y" in (of(effects, Deliver)[0].error or "")
    ok(made)


def test_an_expired_lease_cancels_the_pull() -> None:
    made = front()
    made.handle(0.0, Submit(generation()))
    made.handle(0.1, first_token())
    effects = made.handle(0.2, Returned("prefill-0", "a", 0, "lease expired"))
    assert of(effects, Send)[0] == Send("decode-0", Cancel("a", 0))
    ok(made)


@pytest.mark.promise(
    "Every message names its attempt, every token its index; stale ones are dropped."
)
def test_stale_answers_are_dropped_and_their_senders_told() -> None:
    made = decoding(front())
    found = of(made.handle(0.3, Pulled("decode-0", "z", 0)), Send)
    assert found == [Send("decode-0", Cancel("z", 0))]
    assert of(made.handle(0.3, first_token("z")), Send) == [Send("prefill-0", Release("z", 0))]
    assert made.handle(0.3, Returned("decode-0", "a", 7, "preempted")) == []
    ok(made)


@pytest.mark.promise(
    "Every message names its attempt, every token its index; stale ones are dropped."
)
def test_duplicates_are_dropped_and_a_gap_is_a_retry() -> None:
    made = decoding(front(), max_tokens=9)
    made.handle(0.3, tokens(made, "a", 1))
    assert made.handle(0.3, tokens(made, "a", 1)) == []
    effects = made.handle(0.4, tokens(made, "a", 3))
    assert Send("decode-0", Cancel("a", 0)) in effects
    assert of(effects, Deliver) == []
    assert sent(effects, Prefill)[0].generation.output == (50, 61)
    ok(made)


@pytest.mark.promise("Running streams finish, new requests get 503, then everything ends.")
def test_draining_takes_nothing_new_and_finishes_the_rest() -> None:
    made = decoding(front(), max_tokens=2)
    made.handle(0.3, Drain())
    (refusal,) = of(made.handle(0.3, Submit(generation("b"))), Deliver)
    assert (refusal.error_status, refusal.final) == (503, True)
    assert refusal.retry_after_s is not None
    assert not made.idle
    made.handle(0.4, tokens(made, "a", 1, finish="length"))
    assert made.idle


def test_snapshot_says_what_is_held() -> None:
    made = decoding(front())
    made.handle(0.3, UnitReport("decode-0", "d1", 20, 3, 1, 4, 0))
    shot = made.snapshot()
    assert shot.state_to_count["decoding"] == 1
    assert shot.role_to_units == {"prefill": {"prefill-0": 1}, "decode": {"decode-0": 1}}
    assert shot.unit_to_report["decode-0"].num_blocks_used == 3
    made.handle(0.4, tokens(made, "a", 1))
    assert (shot.totals.tokens_out, made.totals.tokens_out) == (1, 2)


def test_check_sees_a_wrong_count() -> None:
    made = decoding(front())
    made.units.by_name["decode-0"].num_requests += 1
    assert made.check()


def test_a_unit_without_ranks_is_sent_nothing_until_one_is_back() -> None:
    made = front()
    made.handle(0.0, UnitReport("decode-0", "d1", 0, 0, 0, 0, 0, num_ranks=0))
    assert sent(made.handle(0.1, Submit(generation("a"))), Prefill) == []
    assert made.requests.by_id["a"].state == "queued"
    effects = made.handle(0.2, UnitReport("decode-0", "d1", 20, 0, 0, 4, 0, num_blocks_request=20))
    assert len(sent(effects, Prefill)) == 1
    assert made.check() == []


def attempt_id(made: Front, name: str) -> int:
    return made.requests.running.attempt_id_of(made.requests.by_id[name])


def taken_over(made: Front, now_s: float, *held: int) -> list[Effect]:
    effects = made.handle(now_s, UnitUp("decode-0", "decode", "d2", 20, 4, held=held))
    ok(made)
    return effects


@pytest.mark.promise("requests in decode keep their place for 10 s")
def test_requests_wait_for_the_leader_that_takes_their_ranks_over_and_go_on_where_they_were() -> (
    None
):
    made = decoding(front())
    made.handle(0.3, tokens(made, "a", 1))
    assert sent(made.handle(0.4, LeaderDown("decode-0", "killed")), Prefill) == []
    ok(made)
    assert made.snapshot().role_to_units["decode"] == {"decode-0": 0}
    made.handle(0.5, Submit(generation("b")))
    assert made.requests.by_id["b"].state == "queued"
    effects = taken_over(made, 1.0, attempt_id(made, "a"), 12345)
    assert [effect.to for effect in of(effects, Send)] == ["decode-0", "decode-0", "prefill-0"]
    (resume,) = sent(effects, Resume)
    (going,) = resume.generations
    found = (going.output, going.attempt_id, going.attempt, resume.is_last)
    assert found == ((50, 61), attempt_id(made, "a"), 0, True)
    made.handle(1.1, tokens(made, "a", 2))
    assert made.requests.by_id["a"].state == "decoding"
    assert made.totals.retries == 0
    ok(made)


def test_what_the_ranks_do_not_hold_is_tried_again() -> None:
    made = decoding(front())
    made.handle(0.4, LeaderDown("decode-0", "killed"))
    effects = taken_over(made, 1.0)
    assert [prefill.generation.attempt for prefill in sent(effects, Prefill)] == [1]
    assert sent(effects, Resume) == [Resume((), is_last=True)]


def test_a_request_on_its_way_to_a_leaderless_unit_is_tried_again_at_once() -> None:
    made = front()
    made.handle(0.0, Submit(generation()))
    made.handle(0.1, first_token())
    made.handle(0.2, LeaderDown("decode-0", "killed"))
    assert made.requests.by_id["a"].attempt == 1
    ok(made)


@pytest.mark.promise("requests in decode keep their place for 10 s")
def test_a_unit_that_no_leader_takes_over_is_down() -> None:
    made = decoding(front())
    made.handle(0.4, LeaderDown("decode-0", "killed"))
    made.handle(0.4 + ORPHAN_S - 0.1, UnitReport("prefill-0", "p1", 20, 0, 0, 4, 0))
    made.handle(0.4 + ORPHAN_S - 0.1, Tick())
    assert made.requests.by_id["a"].state == "decoding"
    made.handle(0.5 + ORPHAN_S, Tick())
    assert "decode-0" not in made.units.by_name
    assert made.requests.by_id["a"].attempt == 1
    ok(made)


def test_a_unit_whose_successor_was_heard_first_is_led() -> None:
    """Supervisor and leader use separate connections, so their messages may arrive in any order."""
    made = decoding(front())
    taken_over(made, 0.3, attempt_id(made, "a"))
    made.handle(0.4, LeaderDown("decode-0", "killed"))
    report = UnitReport("decode-0", "d2", 20, 1, 1, 4, 0)
    made.handle(0.5, report)
    assert made.snapshot().role_to_units["decode"] == {"decode-0": 0}, "it may be a dead one's last"
    made.handle(0.5 + LAST_WORDS_S, report)
    assert made.snapshot().role_to_units["decode"] != {"decode-0": 0}
    made.handle(0.5 + ORPHAN_S, Tick())
    assert made.requests.by_id["a"].state == "decoding"
    assert made.totals.retries == 0
    ok(made)


def test_a_client_that_leaves_meanwhile_is_not_gone_on_with() -> None:
    made = decoding(front())
    held = attempt_id(made, "a")
    made.handle(0.4, LeaderDown("decode-0", "killed"))
    made.handle(0.5, Cancel("a", 0))
    assert sent(taken_over(made, 1.0, held), Resume) == [Resume((), is_last=True)]


def test_what_is_held_for_an_earlier_front_is_nobodys() -> None:
    made = front(units=False)
    assert sent(taken_over(made, 1.0, 12345), Resume) == [Resume((), is_last=True)]


@pytest.mark.promise(
    "A line starts if no other request waits, a slot and blocks are free, and prefill has a free rank or"
    " works for batches alone."
)
def test_a_batch_waits_for_spare_capacity_and_is_requeued() -> None:
    made = front(max_running=1)
    made.handle(0.0, of_tenant("a", "x"))
    refusal = made.admission.refusal(0.1, "x/batch", 1, 10)
    assert refusal is not None
    assert refusal.code == NO_SPARE
    made.handle(0.1, first_token("a", finish="length"))
    assert made.admission.refusal(0.2, "x/batch", 1, 10) is None
    (prefill,) = sent(made.handle(0.2, of_tenant("b", "x/batch")), Prefill)
    assert prefill.generation.request_id == "b"
    made.handle(0.3, first_token("b"))
    made.handle(0.4, Pulled("decode-0", "b", 0))
    # Another tenant's request arrives while the batch uses all capacity.
    effects = made.handle(0.5, of_tenant("c", "y"))
    assert [one.generation.request_id for one in sent(effects, Prefill)] == ["c"]
    assert sent(effects, Cancel) == [Cancel("b", 0)]
    assert made.requests.by_id["b"].state == "queued"
    ok(made)
    made.handle(0.6, of_tenant("d", "z"))
    effects = made.handle(0.7, first_token("c", finish="length"))
    assert [one.generation.request_id for one in sent(effects, Prefill)] == ["d"]
    effects = made.handle(0.8, first_token("d", finish="length"))
    (again,) = sent(effects, Prefill)
    assert (again.generation.request_id, again.generation.output) == ("b", (50,))
    assert made.requests.by_id["b"].num_retries == 0
    ok(made)


def test_a_batch_gives_way_with_no_more_than_is_needed() -> None:
    """Two lines run, the later one in decode; prefill has no free capacity."""
    made = front(units=False)
    for name in ("prefill-0", "prefill-1"):
        made.handle(0.0, UnitUp(name, "prefill", f"{name}-1", 20, 1))
    made.handle(0.0, UnitUp("decode-0", "decode", "d1", 200, 64))
    assert made.admission.refusal(0.0, "x/batch", 1, 10) is None
    (first,) = of(made.handle(0.0, of_tenant("b1", "x/batch")), Send)
    (second,) = of(made.handle(0.0, of_tenant("b2", "x/batch")), Send)
    assert (first.to, second.to) == ("prefill-0", "prefill-1")
    made.handle(0.1, PrefillDone("prefill-1", Token("b2", 0, 0, 50, None), LEASE))
    made.handle(0.2, Pulled("decode-0", "b2", 0))
    (third,) = of(made.handle(0.3, of_tenant("a", "y")), Send)
    assert third.to == "prefill-1"
    effects = made.handle(0.4, of_tenant("c", "z"))
    assert [one.generation.request_id for one in sent(effects, Prefill)] == ["c"]
    assert sent(effects, Release) == [Release("b1", 0)]
    assert sent(effects, Cancel) == [], "the one in decode goes on"
    assert made.requests.by_id["b2"].state == "decoding"
    assert made.requests.by_id["b1"].state == "queued"
    ok(made)
    # Preempting a line would not help the next request, so no line is preempted.
    effects = made.handle(0.5, of_tenant("d", "z"))
    assert (sent(effects, Prefill), sent(effects, Cancel)) == ([], [])
    assert made.requests.by_id["b2"].state == "decoding"
    ok(made)


def test_a_tenant_that_had_more_gives_its_last_request_back_and_goes_on_later() -> None:
    made = front(burst_tokens=100_000, max_running=4)
    made.handle(0.0, UnitReport("decode-0", "d1", 20, 0, 0, 4, 0, step_s=0.01))
    made.handle(0.0, of_tenant("b0", "y"))
    made.handle(0.0, first_token("b0", finish="length"))
    for number in range(6):
        made.handle(0.0, of_tenant(f"a{number}", "x"))
    for number in range(4):
        made.handle(0.1, first_token(f"a{number}"))
        made.handle(0.2, Pulled("decode-0", f"a{number}", 0))
    made.handle(0.3, tokens(made, "a0", 1), tokens(made, "a3", 1))
    effects = made.handle(0.4, of_tenant("b1", "y"))
    assert [one.generation.request_id for one in sent(effects, Prefill)] == ["b1"]
    assert sent(effects, Cancel) == [Cancel("a3", 0)]
    assert (made.totals.requeued, made.totals.retries, made.totals.preemptions) == (1, 0, 0)
    # When a0 ends, the preempted a3 is next: it is older than a4 and a5.
    ok(made)
    effects = made.handle(0.5, tokens(made, "a0", 2, finish="length"))
    (again,) = sent(effects, Prefill)
    assert (again.generation.request_id, again.generation.attempt) == ("a3", 1)
    assert again.generation.output == (50, 61)
    assert made.requests.by_id["a3"].num_retries == 0
    ok(made)


def full_of(tenant: str, num_slots: int = 4, num_ahead: int = 1) -> Front:
    """Return a front with `num_slots` + `num_ahead` + 1 requests of the tenant: all but the last have a
    first token, and the first `num_slots` are reported as pulled. `num_ahead` -1 leaves a slot
    free.
    """
    made = front(units=False, burst_tokens=100_000)
    made.handle(0.0, UnitUp("prefill-0", "prefill", "p1", 200, 64))
    made.handle(0.0, UnitUp("decode-0", "decode", "d1", 200, num_slots))
    for name in ("b", "x0"):  # Both tenants have been served before.
        made.handle(0.0, of_tenant(name, "y" if name == "b" else tenant))
        made.handle(0.0, first_token(name, finish="length"))
    for number in range(num_slots + num_ahead + 1):
        made.handle(0.0, of_tenant(f"a{number}", tenant))
    for number in range(num_slots + num_ahead):
        made.handle(0.1, first_token(f"a{number}"))
    for number in range(num_slots):
        made.handle(0.2, Pulled("decode-0", f"a{number}", 0))
        for index in range(1, 10):
            made.handle(0.2, tokens(made, f"a{number}", index))
    return made


@pytest.mark.parametrize("tenant", ["x", "x/batch"])
def test_one_that_is_prefilled_takes_the_slot_of_a_tenant_that_had_more(tenant: str) -> None:
    """No request is preempted before the new one's KV is ready, and never one without a slot."""
    made = full_of(tenant)
    effects = made.handle(0.4, of_tenant("c", "y"))
    assert [one.generation.request_id for one in sent(effects, Prefill)] == ["c"]
    assert sent(effects, Cancel) == []
    effects = made.handle(0.5, first_token("c"))
    messages = [one.message for one in of(effects, Send) if one.to == "decode-0"]
    # Cancel may free the slot at once: the request that takes it must be queued by then.
    assert isinstance(messages[0], Decode)
    assert messages[0].generation.request_id == "c"
    assert messages[1] == Cancel("a3", 0), "the latest that has a slot"
    assert (made.totals.requeued, made.requests.by_id["a3"].num_retries) == (1, 0)
    assert made.requests.by_id["a4"].state == "transferring"
    ok(made)


def test_no_slot_is_taken_where_one_is_free_or_for_a_batch() -> None:
    made = full_of("x", num_ahead=-1)
    for name, tenant in (("c", "y"), ("d", "y/batch")):
        made.handle(0.4, of_tenant(name, tenant))
        made.handle(0.5, first_token(name))
    assert made.totals.requeued == 0
    ok(made)


def test_the_first_request_of_a_tenant_never_gives_way() -> None:
    made = front(burst_tokens=100_000, max_running=1)
    made.handle(0.0, of_tenant("b0", "y"))
    made.handle(0.0, first_token("b0", finish="length"))
    for name in ("a0", "a1"):
        made.handle(0.0, of_tenant(name, "x"))
    made.handle(0.1, first_token("a0"))
    assert not sent(made.handle(0.2, of_tenant("b1", "y")), Prefill)
    assert made.totals.requeued == 0
    ok(made)


def test_what_one_line_asks_for_waits_and_is_not_refused() -> None:
    made = front(max_running=1)
    assert made.admission.refusal(0.0, "x/batch", 2, 20) is None
    made.handle(0.0, of_tenant("a", "x/batch"))
    effects = made.handle(0.0, of_tenant("b", "x/batch"))
    assert not [one for one in effects if isinstance(one, Deliver) and one.error]
    assert made.requests.by_id["b"].state == "queued"
    effects = made.handle(0.1, first_token("a", finish="length"))
    assert [one.generation.request_id for one in sent(effects, Prefill)] == ["b"]
    ok(made)


def test_a_batch_takes_nothing_of_its_tenants_share_or_quota_of_requests() -> None:
    made = front()
    made.handle(0.0, Quotas(0.0, (Quota("x", requests=1, day_pico_usd=0, tokens_per_minute=0),)))
    made.handle(0.0, of_tenant("b", "x/batch"))
    assert made.requests.by_id["b"].state == "prefilling"
    assert made.admission.refusal(0.1, "x", 1, 10) is None
    made.handle(0.1, of_tenant("a", "x"))
    assert made.requests.by_id["a"].state == "prefilling"
    assert made.requests.num_placed_of_batches == 1
    ok(made)

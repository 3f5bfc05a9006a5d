"""Test units with old and with new weights at the same time, as in a rollout: neither uses the other's KV."""

from __future__ import annotations

import pytest

from hadal.core.config import Deployment, LimitsConfig
from hadal.core.messages.fleet import Demand, DrainUnit
from hadal.core.messages.generation import Deliver, Generation, Token
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import (
    Cached,
    Cancel,
    Decode,
    FrontUp,
    KvLease,
    LeaderDown,
    Prefill,
    PrefillDone,
    Pulled,
    Release,
    Resume,
    Returned,
    UnitDown,
    UnitUp,
)
from hadal.core.request import State
from hadal.core.seams import Effect, Send, Tick
from hadal.kv.names import extend, root_of
from hadal.roles.front.front import Front
from hadal.roles.reasons import BACKOFF_S, OTHER_WEIGHTS, PREEMPTED
from tests.columns import tokens_message
from tests.unit.roles.driving import generation, of, sent, to

OLD, NEW = "old", "new"
LEASE = KvLease("pool", (1, 2, 3, 4), (0, 0, 0, 0), 200)


def up(made: Front, unit: str, fingerprint: str, *, slots: int = 8) -> list[Effect]:
    """Report that a unit of these weights is up; it replaces a unit of the same name."""
    role, epoch = unit.partition("-")[0], f"{fingerprint} {unit}"
    return made.handle(1.0, UnitUp(unit, role, epoch, 400, slots, fingerprint=fingerprint))


def front(*units: tuple[str, str], slots: int = 8, **limits: int) -> Front:
    made = Front(
        Deployment(limits=LimitsConfig(**limits)), epoch="f", max_context=10_000, fingerprint=OLD
    )
    for unit, fingerprint in units:
        up(made, unit, fingerprint, slots=slots)
    return made


def placed(effects: list[Effect]) -> list[tuple[str, str]]:
    """Return (request, prefill unit) for each Prefill sent."""
    return [
        (effect.message.generation.request_id, effect.to)
        for effect in of(effects, Send)
        if isinstance(effect.message, Prefill)
    ]


def submit(made: Front, name: str, prompt: int = 200) -> list[tuple[str, str]]:
    return placed(made.handle(1.0, Submit(generation(name, prompt, max_tokens=50))))


def done(made: Front, name: str, unit: str, now_s: float = 2.0) -> list[Effect]:
    """Report that a request's prompt is prefilled."""
    record = made.requests.by_id[name]
    token = Token(name, record.attempt, record.num_output, 50)
    return made.handle(now_s, PrefillDone(unit, token, LEASE))


def ok(made: Front) -> None:
    assert made.check() == []


BOTH = (("prefill-0", OLD), ("decode-0", OLD), ("prefill-1", NEW), ("decode-1", NEW))


@pytest.mark.promise(
    "an answer is of one model from its first token to its last, unless its unit outlasts"
    " fleet.drain_timeout_s or dies"
)
@pytest.mark.promise(
    "the front binds each request to one fingerprint when it sends it to prefill: the "
    "newest one under which a unit of each role accepts requests and has capacity"
)
def test_what_comes_goes_to_the_weights_that_came_last_and_stays_with_them() -> None:
    for units, number in ((BOTH, 1), (BOTH[2:] + BOTH[:2], 0)):
        made = front(*units)
        assert submit(made, "a") == [("a", f"prefill-{number}")]
        assert to(done(made, "a", f"prefill-{number}"), Decode) == [f"decode-{number}"]
        ok(made)


@pytest.mark.promise(
    "the front binds each request to one fingerprint when it sends it to prefill: the "
    "newest one under which a unit of each role accepts requests and has capacity"
)
def test_where_the_newest_have_no_room_the_others_go_on() -> None:
    made = front(*BOTH, slots=1)
    found = [submit(made, name) for name in "abc"]
    assert found == [[("a", "prefill-1")], [("b", "prefill-0")], []]
    assert to(done(made, "b", "prefill-0"), Decode) == ["decode-0"]
    assert to(done(made, "a", "prefill-1"), Decode) == ["decode-1"]
    ok(made)


def test_room_is_counted_for_each_fingerprint_by_itself() -> None:
    """Requests sent to the old units use no capacity of the new ones."""
    made = front(*BOTH[:2], slots=2)
    for name in "abc":
        submit(made, name)
        if name != "c":
            done(made, name, "prefill-0")
    assert made.routing.num_free() == 0
    up(made, "prefill-1", NEW, slots=2)
    assert made.routing.num_free() == 0, "none of its weights decodes"
    up(made, "decode-1", NEW, slots=2)
    assert made.routing.num_free() == 3
    assert made.requests.placed_under(OLD).num_transferring == 2
    assert submit(made, "d") == [("d", "prefill-1")]
    assert made.routing.num_free() == 2
    assert made.routing.has_room(generation("e"))
    ok(made)


def test_both_of_a_pair_are_replaced_one_after_the_other() -> None:
    """A prompt is prefilled only once a unit can decode it, in either order of replacement."""
    for first, second in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        made = front(*BOTH[:2])
        up(made, first, NEW)
        assert submit(made, "a") == []
        assert submit(made, "b") == []
        made.handle(1.1, UnitDown(second, "is replaced"))
        assert made.requests.counts[State.QUEUED] == 2
        assert placed(up(made, second, NEW)) == [("a", "prefill-0"), ("b", "prefill-0")]
        ok(made)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_units_that_only_drain_are_sent_nothing_and_nothing_is_prefilled_for_them(
    role: str,
) -> None:
    made = front(*BOTH[:2], (f"{role}-1", NEW))
    assert submit(made, "a") == [("a", "prefill-0")]
    made.handle(2.1, DrainUnit(f"{role}-0", 30.0, 1))
    assert made.units.serving() == submit(made, "b") == []
    other = {"prefill": "decode", "decode": "prefill"}[role]
    assert placed(up(made, f"{other}-1", NEW)) == [("b", "prefill-1")]
    ok(made)


def test_a_successor_of_the_same_weights_goes_on_beside_the_others() -> None:
    made = front(*BOTH[:2], ("prefill-1", NEW))
    submit(made, "a")
    (decode,) = sent(done(made, "a", "prefill-0"), Decode)
    made.handle(2.0, Pulled("decode-0", "a", 0))
    made.handle(2.1, LeaderDown("decode-0", "killed"))
    assert submit(made, "b") == []
    held = (decode.generation.attempt_id,)
    effects = made.handle(
        2.2, UnitUp("decode-0", "decode", "next", 400, 8, held=held, fingerprint=OLD)
    )
    (resume,) = sent(effects, Resume)
    assert [one.request_id for one in resume.generations] == ["a"]
    assert placed(effects) == [("b", "prefill-0")]
    ok(made)


def test_what_is_prefilled_and_cannot_be_decoded_is_prefilled_by_the_others() -> None:
    made = front(*BOTH[:2], max_retries=0)
    submit(made, "a")
    up(made, "prefill-1", NEW)
    up(made, "decode-0", NEW)
    ok(made)
    effects = done(made, "a", "prefill-0")
    assert to(effects, Decode) == []
    assert sent(effects, Release) == [Release("a", 0)]
    assert [deliver.final for deliver in of(effects, Deliver)] == [False]
    effects = made.handle(2.0 + BACKOFF_S, Tick())
    assert placed(effects) == [("a", "prefill-1")]
    (again,) = sent(effects, Prefill)
    assert (again.generation.output, again.generation.fingerprint) == ((50,), NEW)
    assert to(done(made, "a", "prefill-1", 3.0), Decode) == ["decode-0"]
    ok(made)


def test_a_drain_loses_nothing_of_what_is_on_its_way() -> None:
    """A request in decode continues there until the drain's deadline. Then the other units prefill it,
    and also the request that is still in prefill.
    """
    made = front(*BOTH[:2], max_retries=0)
    for name in "ab":
        submit(made, name)
    assert to(done(made, "a", "prefill-0"), Decode) == ["decode-0"]
    made.handle(2.1, DrainUnit("decode-0", 5.0, 1))
    made.handle(2.1, DrainUnit("prefill-0", 5.0, 2))
    up(made, "prefill-1", NEW)
    up(made, "decode-1", NEW)
    made.handle(2.2, Pulled("decode-0", "a", 0))
    assert made.requests.by_id["a"].state == "decoding"
    effects = made.handle(7.2, Tick())
    assert placed(effects) == [("a", "prefill-1"), ("b", "prefill-1")]
    assert not of(effects, Deliver)
    ok(made)


def held(made: Front, now_s: float) -> dict[str, int]:
    """Return draining unit -> number of its requests, as reported to the fleet."""
    (demand,) = sent(made.handle(now_s, Tick()), Demand)
    return {facts.unit: facts.num_requests for facts in demand.units if facts.drain_number}


def test_what_is_prefilled_ends_with_the_last_decode_unit_of_its_weights() -> None:
    """The old decode unit drains beside new weights; the whole answer is by the old weights."""
    made = front(*BOTH[:2])
    submit(made, "a")
    up(made, "prefill-1", NEW)
    up(made, "decode-1", NEW)
    assert sent(made.handle(1.2, DrainUnit("decode-0", 30.0, 1)), Cancel) == []
    assert held(made, 1.5) == {"decode-0": 1}
    assert to(done(made, "a", "prefill-0"), Decode) == ["decode-0"]
    assert submit(made, "b") == [("b", "prefill-1")]
    made.handle(2.1, Pulled("decode-0", "a", 0))
    assert held(made, 3.0) == {"decode-0": 1}
    attempt_id = made.requests.running.attempt_id_of(made.requests.by_id["a"])
    made.handle(3.1, tokens_message("decode-0", [(attempt_id, 1, 51, "length")]))
    assert held(made, 4.5) == {"decode-0": 0}
    ok(made)


def test_another_decode_unit_of_its_weights_is_better_than_one_that_drains() -> None:
    made = front(*BOTH[:2], ("decode-2", OLD))
    submit(made, "a")
    made.handle(1.2, DrainUnit("decode-0", 30.0, 1))
    assert held(made, 1.5) == {"decode-0": 0}
    assert to(done(made, "a", "prefill-0"), Decode) == ["decode-2"]
    ok(made)


@pytest.mark.promise(
    "an answer is of one model from its first token to its last, unless its unit outlasts"
    " fleet.drain_timeout_s or dies"
)
def test_a_request_that_has_tokens_stays_with_the_weights_that_made_them() -> None:
    made = front(*BOTH[:2])
    submit(made, "a")
    done(made, "a", "prefill-0")
    made.handle(2.0, Pulled("decode-0", "a", 0))
    up(made, "prefill-1", NEW)
    up(made, "decode-1", NEW)
    effects = made.handle(2.1, Returned("decode-0", "a", 0, PREEMPTED))
    assert placed(effects) == [("a", "prefill-0")]
    assert to(done(made, "a", "prefill-0", 2.2), Decode) == ["decode-0"]
    ok(made)
    made.handle(2.3, Pulled("decode-0", "a", 1))
    made.handle(2.4, UnitDown("prefill-0", "killed"))
    assert placed(made.handle(2.5, Returned("decode-0", "a", 1, PREEMPTED))) == [("a", "prefill-1")]
    ok(made)


def test_names_are_those_of_the_weights_and_are_made_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = front(*BOTH, slots=1)
    text, given = generation("b", 200).prompt, []

    def noted(root: bytes, chain: bytes, *rest: object) -> bytes:
        given.append(root)
        return extend(root, chain, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("hadal.roles.front.names.extend", noted)
    for name in "abcd":
        submit(made, name)
    assert [made.requests.by_id[name].fingerprint for name in "ab"] == [NEW, OLD]
    (decode,) = sent(done(made, "b", "prefill-0"), Decode)
    assert decode.generation.chain == extend(root_of(b"old"), b"", text, b"")
    named = len(given)
    for _ in range(3):
        made.handle(2.5, Tick())
    assert len(given) == named, "one that waits is named once under each"
    ok(made)


def test_what_a_unit_has_of_other_weights_is_not_what_a_prompt_needs() -> None:
    made = front(("prefill-0", OLD), ("decode-0", OLD), ("prefill-1", OLD))
    chain = extend(root_of(b"old"), b"", generation("a", 200).prompt, b"")
    made.handle(1.0, Cached("prefill-1", "old prefill-1", chain, b""))
    up(made, "prefill-1", NEW)
    assert made.units.cache.num_names("prefill-1") == 0, "it went with the unit"
    made.handle(1.0, Cached("prefill-1", "new prefill-1", chain, b""))
    assert submit(made, "a") == [("a", "prefill-0")]
    assert made.requests.by_id["a"].num_cached == 0
    ok(made)


def test_a_chain_that_a_gateway_made_under_the_others_is_left_behind() -> None:
    made = front(*BOTH[:2])
    early = made.names.named(generation("a", 200))
    assert early.fingerprint == OLD
    up(made, "prefill-1", NEW)
    assert made.names.fingerprint == OLD
    up(made, "decode-0", NEW)
    assert made.names.fingerprint == NEW, "the next prompts are named as they will be placed"
    up(made, "decode-1", OLD)
    up(made, "prefill-0", OLD)
    (prefill,) = sent(made.handle(1.0, Submit(early)), Prefill)
    assert prefill.generation.chain == extend(root_of(b"new"), b"", early.prompt, b"")
    found = made.snapshot().unit_to_fingerprint
    assert found == {"prefill-0": OLD, "prefill-1": NEW, "decode-0": NEW, "decode-1": OLD}
    assert made.snapshot().fingerprint == NEW


def test_a_leader_with_other_weights_takes_nothing_over() -> None:
    made = front(*BOTH)
    submit(made, "a")
    (decode,) = sent(done(made, "a", "prefill-1"), Decode)
    made.handle(2.0, Pulled("decode-1", "a", 0))
    made.handle(2.1, LeaderDown("decode-1", "killed"))
    held = (decode.generation.attempt_id,)
    effects = made.handle(
        2.2, UnitUp("decode-1", "decode", "next", 400, 8, held=held, fingerprint=OLD)
    )
    assert sent(effects, Resume) == [Resume((), is_last=True)]
    assert len(sent(effects, FrontUp)) == 1
    assert placed(effects) == [("a", "prefill-0")]
    ok(made)


def test_a_unit_that_is_another_by_now_gives_an_attempt_back_at_no_cost() -> None:
    made = front(*BOTH[:2], max_retries=0)
    submit(made, "a")
    made.handle(2.0, Returned("prefill-0", "a", 0, OTHER_WEIGHTS))
    assert made.requests.by_id["a"].state == "queued"
    assert placed(made.handle(2.0 + 2 * BACKOFF_S, Tick())) == [("a", "prefill-0")]
    ok(made)


def test_a_unit_that_says_none_has_the_front_s() -> None:
    made = front(("prefill-0", ""), ("decode-0", OLD))
    assert submit(made, "a") == [("a", "prefill-0")]
    assert to(done(made, "a", "prefill-0"), Decode) == ["decode-0"]
    given: Generation = made.requests.by_id["a"].generation
    assert given.fingerprint == OLD

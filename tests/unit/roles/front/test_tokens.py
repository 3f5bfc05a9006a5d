"""A unit's tokens at the front: told one by one with text, and counted alone without it."""

from __future__ import annotations

from hadal.core.config import Deployment
from hadal.core.messages import (
    Decode,
    KvLease,
    PrefillDone,
    Pulled,
    Returned,
    Stop,
    Submit,
    Token,
    UnitUp,
)
from hadal.core.messages import Prefill as PrefillMessage
from hadal.core.plans import Draw
from hadal.core.seams import Closing, Deliver, Send
from hadal.roles.front.front import Front
from tests.columns import Row, tokens_message
from tests.unit.roles.driving import finals, generation, of, sent

LEASE = KvLease("pool", (1,), (0,), 10)


def decoding(
    names: str, *, keeps_text: bool = True, is_pulled: bool = True, epoch: str = "f1"
) -> tuple[Front, list[int]]:
    """A front with these requests in decode, one token each, and their attempt ids."""
    made, attempt_ids = (
        Front(Deployment(), epoch=epoch, max_context=1000, keeps_text=keeps_text),
        [],
    )
    made.handle(0.0, UnitUp("prefill-0", "prefill", "p1", 20, 4))
    made.handle(0.0, UnitUp("decode-0", "decode", "d1", 20, 4))
    for name in names:
        made.handle(0.0, Submit(generation(name)))
        done = PrefillDone("prefill-0", Token(name, 0, 0, 50), LEASE)
        (decode,) = sent(made.handle(0.1, done), Decode)
        attempt_ids.append(decode.generation.attempt_id)
        if is_pulled:
            made.handle(0.2, Pulled("decode-0", name, 0))
    return made, attempt_ids


def test_each_token_goes_to_its_reader_with_what_was_asked_for() -> None:
    made, (a, b) = decoding("ab")
    rows: list[Row] = [(a, 1, 61, None), (b, 1, 71, "stop")]
    effects = made.handle(0.3, tokens_message("decode-0", rows, {0: Draw(-0.5, ((61, -0.5),))}))
    assert of(effects, Deliver) == [
        Deliver("a", (Token("a", 0, 1, 61, None, -0.5, ((61, -0.5),)),)),
        Deliver(
            "b", (Token("b", 0, 1, 71, "stop"),), True, closing=Closing("prefill-0", "decode-0", 0)
        ),
    ]
    assert (made.totals.tokens_out, made.totals.finished) == (4, 1)
    assert made.check() == []


def test_without_text_only_ends_are_told_and_everything_is_counted() -> None:
    made, (a, b) = decoding("ab", keeps_text=False)
    assert (
        of(
            made.handle(0.3, tokens_message("decode-0", [(a, 1, 0, None), (b, 1, 0, None)])),
            Deliver,
        )
        == []
    )
    effects = made.handle(0.4, tokens_message("decode-0", [(b, 2, 7, "length"), (a, 2, 0, None)]))
    assert finals(effects) == [("b", None)]
    assert made.totals.tokens_out == 6
    assert made.check() == []


def test_without_text_a_lost_request_goes_on_as_long_as_it_was() -> None:
    made, (a,) = decoding("a", keeps_text=False)
    made.handle(0.3, tokens_message("decode-0", [(a, 1, 0, None)]))
    (again,) = sent(made.handle(0.4, Returned("decode-0", "a", 0, "preempted")), PrefillMessage)
    assert (len(again.generation.output), again.generation.attempt) == (2, 1)
    effects = made.handle(0.5, tokens_message("decode-0", [(a, 2, 0, "stop")]))
    assert of(effects, Deliver) == [], "of the attempt before"
    assert made.check() == []


def test_tokens_under_another_front_s_attempt_ids_are_nobody_s() -> None:
    """A unit may have attempts of a front that died beside those of its successor."""
    made, mine = decoding("ab", epoch="f1")
    _, others = decoding("ab", epoch="f2")
    assert not set(mine) & set(others)
    effects = made.handle(
        0.3, tokens_message("decode-0", [(attempt_id, 1, 61, None) for attempt_id in others])
    )
    assert effects == [Send("decode-0", Stop(tuple(others)))], (
        "no text, and the unit may free what it holds of them"
    )
    assert made.totals.tokens_out == 2
    assert made.check() == []


def test_tokens_that_nobody_waits_for_are_stopped_where_they_come_from() -> None:
    made, (known,) = decoding("a")
    for stranger in (known + (1 << 30), known + 1, 1 << 62):
        late = tokens_message("decode-0", [(stranger, 1, 61, None)])
        assert of(made.handle(0.3, late), Send) == [Send("decode-0", Stop((stranger,)))]
        assert (
            of(made.handle(0.3, tokens_message("decode-0", [(stranger, 1, 61, "stop")])), Send)
            == []
        )
    (stop,) = sent(made.handle(0.3, tokens_message("decode-1", [(known, 1, 61, None)])), Stop)
    assert stop.attempt_ids == (known,), "another unit's"
    assert made.check() == []


def test_tokens_before_the_word_that_kv_was_pulled_say_it() -> None:
    made, (a,) = decoding("a", is_pulled=False)
    effects = made.handle(0.3, tokens_message("decode-0", [(a, 1, 61, None)]))
    assert [token.token for deliver in of(effects, Deliver) for token in deliver.tokens] == [61]
    assert made.check() == []

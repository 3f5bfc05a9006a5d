"""Hints at the front: their target, and that it learns of the end exactly once."""

from __future__ import annotations

from typing import Any

import pytest

from hadal.core.config import Deployment
from hadal.core.messages import (
    Cancel,
    Decode,
    KvLease,
    Prefill,
    PrefillDone,
    PrefilledEarly,
    PullEarly,
    Release,
    Returned,
    Submit,
    Token,
    UnitDown,
    UnitUp,
)
from hadal.core.seams import Effect, Tick
from hadal.roles.front.front import Front
from tests.unit.roles.driving import finals, generation, sent, to


def front(
    *, num_decode: int = 1, early_pull: str = "auto", prompt: int = 200, **options: Any
) -> Front:
    """One request is being prefilled."""
    made = Front(
        Deployment(early_pull=early_pull, unit_timeout_s=50.0), epoch="f1", max_context=5000
    )
    handle(made, UnitUp("prefill-0", "prefill", "p1", 60, 4))
    for index in range(num_decode):
        handle(made, UnitUp(f"decode-{index}", "decode", "d1", 60, 4))
    handle(made, Submit(generation("a", prompt, **options)))
    return made


def handle(made: Front, event: Any, now_s: float = 0.0) -> list[Effect]:
    effects = made.handle(now_s, event)
    assert made.check() == []
    return effects


def hint(num_tokens: int = 64, attempt: int = 0, unit: str = "prefill-0") -> PrefilledEarly:
    blocks = tuple(range(1, 1 + num_tokens // 64))
    return PrefilledEarly(
        unit, "a", attempt, KvLease("pool", blocks, (0,) * len(blocks), num_tokens)
    )


def first_token(attempt: int = 0, finish: str | None = None) -> PrefillDone:
    lease = None if finish else KvLease("pool", (1, 2, 3, 4), (0,) * 4, 200)
    return PrefillDone("prefill-0", Token("a", attempt, 0, 50, finish), lease)


def used(made: Front, unit: str = "decode-0") -> tuple[int, int]:
    known = made.units.by_name[unit]
    return known.num_requests, known.num_blocks_used


def test_a_hint_goes_to_a_unit_that_counts_the_request_and_later_ones_and_decode_to_the_same() -> (
    None
):
    made = front(num_decode=2)
    (early,) = sent(handle(made, hint(64)), PullEarly)
    found = (early.generation.prompt, early.generation.output, early.lease)
    assert found == (tuple(range(100, 300)), (), hint().lease)
    assert (used(made), used(made, "decode-1")) == ((1, 4), (0, 0))
    made.units.by_name["decode-0"].changed()
    made.units.by_name["decode-0"].num_requests_max = 1  # Whoever would be chosen now is the other.
    assert to(handle(made, hint(128)), PullEarly) == ["decode-0"]
    effects = handle(made, first_token())
    assert to(effects, Decode) == ["decode-0"]
    assert to(effects, Cancel) == []
    assert used(made) == (1, 4)


def test_the_first_token_may_need_another_block_at_the_unit() -> None:
    made = front(prompt=191)
    handle(made, hint())
    assert used(made) == (1, 3)
    lease = KvLease("pool", (1, 2, 3), (0,) * 3, 191)
    handle(made, PrefillDone("prefill-0", Token("a", 0, 0, 50), lease))
    assert used(made) == (1, 4)


def test_hints_that_are_late_stale_doubled_or_of_others_are_ignored() -> None:
    made = front()
    assert (
        sent(handle(made, hint(attempt=1)), PullEarly)
        == sent(handle(made, hint(unit="prefill-1")), PullEarly)
        == []
    )
    assert len(sent(handle(made, hint(128)), PullEarly)) == 1
    assert sent(handle(made, hint(128)), PullEarly) == sent(handle(made, hint(64)), PullEarly) == []
    handle(made, first_token())
    assert sent(handle(made, hint(192)), PullEarly) == []
    handle(made, Cancel("a", 0))
    assert handle(made, hint(192)) == []


def test_hints_are_ignored_where_they_are_off_or_no_decode_follows() -> None:
    assert sent(handle(front(early_pull="off"), hint()), PullEarly) == []
    assert sent(handle(front(max_tokens=1), hint()), PullEarly) == []
    assert sent(handle(front(num_decode=0), hint()), PullEarly) == []


def test_a_hint_with_little_news_is_left_for_the_next() -> None:
    made = front(prompt=64 * 40)
    assert len(sent(handle(made, hint(64 * 4)), PullEarly)) == 1
    assert sent(handle(made, hint(64 * 6)), PullEarly) == []
    assert len(sent(handle(made, hint(64 * 7)), PullEarly)) == 1


@pytest.mark.parametrize("is_told", [True, False])
def test_a_unit_that_was_told_hears_once_that_it_is_over(is_told: bool) -> None:
    told = ["decode-0"] if is_told else []
    for end in (
        Cancel("a", 0),
        Returned("prefill-0", "a", 0, "step failed: x"),
        UnitDown("prefill-0", "died"),
        Tick(),
        first_token(finish="stop"),
        PrefillDone("prefill-0", Token("a", 0, 7, 50), hint().lease),
    ):
        made = front()
        if is_told:
            handle(made, hint())
        made.requests.by_id["a"].moved_s = 300.0
        effects = handle(made, end, 0.0 if not isinstance(end, Tick) else 10_000.0)
        if isinstance(end, Tick):
            assert finals(effects) == [("a", 504)]
        assert to(effects, Cancel) == told, end
        assert "decode-0" not in made.units.by_name or used(made) == (0, 0)
        if "a" in made.requests.by_id:
            assert made.requests.by_id["a"].decode_unit is None
            later = [*handle(made, hint(128)), *handle(made, Cancel("a", 0))]
            assert to(later, PullEarly) == to(later, Cancel) == []


def test_a_retry_is_hinted_anew() -> None:
    made = front()
    handle(made, hint(128))
    handle(made, Returned("prefill-0", "a", 0, "step failed: x"))
    effects = handle(made, Tick(), 10.0)
    assert [message.generation.attempt for message in sent(effects, Prefill)] == [1]
    (early,) = sent(handle(made, hint(64, attempt=1)), PullEarly)
    assert early.generation.attempt == 1
    assert used(made) == (1, 4)


@pytest.mark.parametrize(
    "event", [UnitDown("decode-0", "died"), Returned("decode-0", "a", 0, "rank lost")]
)
def test_losing_the_decode_unit_costs_a_prompt_nothing(event: UnitDown | Returned) -> None:
    made = front(num_decode=2)
    handle(made, hint(128))
    effects = handle(made, event)
    assert to(effects, Cancel) == to(effects, Release) == to(effects, Prefill) == []
    assert made.totals.retries == 0
    if isinstance(event, UnitDown):
        assert to(handle(made, hint(192)), PullEarly) == ["decode-1"]
        assert to(handle(made, first_token()), Decode) == ["decode-1"]
    else:
        assert to(handle(made, first_token()), Decode) == ["decode-0"]


def test_a_unit_that_takes_over_is_told_of_all_there_is() -> None:
    made = front(num_decode=2, prompt=64 * 40)
    handle(made, hint(64 * 20))
    handle(made, UnitDown("decode-0", "died"))
    assert to(handle(made, hint(64 * 21)), PullEarly) == ["decode-1"]


def test_the_unit_is_chosen_anew_for_decode_if_it_died() -> None:
    made = front()
    handle(made, hint(128))
    handle(made, UnitDown("decode-0", "died"))
    handle(made, UnitUp("decode-7", "decode", "d2", 20, 4))
    assert to(handle(made, first_token()), Decode) == ["decode-7"]

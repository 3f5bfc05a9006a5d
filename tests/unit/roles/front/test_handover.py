"""Test KV transfer at the front: the decode unit's counts, and a request that ends before its transfer."""

from __future__ import annotations

from typing import Any

import pytest

from hadal.core.config import Deployment
from hadal.core.messages.generation import Token
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import (
    Cancel,
    Decode,
    KvLease,
    PrefillDone,
    Returned,
    UnitDown,
    UnitUp,
)
from hadal.core.seams import Effect, Tick
from hadal.roles.front.front import Front
from tests.unit.roles.driving import finals, generation, to


def front(prompt: int = 200) -> Front:
    """Return a front with one request in prefill."""
    made = Front(Deployment(unit_timeout_s=50.0), epoch="f1", max_context=5000)
    handle(made, UnitUp("prefill-0", "prefill", "p1", 60, 4))
    handle(made, UnitUp("decode-0", "decode", "d1", 60, 4))
    handle(made, Submit(generation("a", prompt)))
    return made


def handle(made: Front, event: Any, now_s: float = 0.0) -> list[Effect]:
    effects = made.handle(now_s, event)
    assert made.check() == []
    return effects


def first_token(index: int = 0, finish: str | None = None, num_tokens: int = 200) -> PrefillDone:
    blocks = tuple(range(1, 1 + -(-num_tokens // 64)))
    lease = None if finish else KvLease("pool", blocks, (0,) * len(blocks), num_tokens)
    return PrefillDone("prefill-0", Token("a", 0, index, 50, finish), lease)


def used(made: Front) -> tuple[int, int]:
    known = made.units.by_name["decode-0"]
    return known.num_requests, known.num_blocks_used


def test_the_unit_counts_the_block_that_the_first_token_needs() -> None:
    made = front(prompt=191)
    assert (used(made), made.requests.by_id["a"].num_blocks) == ((0, 0), 3)
    assert to(handle(made, first_token(num_tokens=191)), Decode) == ["decode-0"]
    assert used(made) == (1, 4)


@pytest.mark.parametrize(
    "end",
    [
        Cancel("a", 0),
        Returned("prefill-0", "a", 0, "step failed: x"),
        UnitDown("prefill-0", "died"),
        Tick(),
        first_token(finish="stop"),
        first_token(index=7),
    ],
)
def test_a_prompt_that_ends_in_prefill_is_nothing_to_a_decode_unit(end: Any) -> None:
    made = front()
    made.requests.by_id["a"].moved_s = 300.0
    effects = handle(made, end, 0.0 if not isinstance(end, Tick) else 10_000.0)
    if isinstance(end, Tick):
        assert finals(effects) == [("a", 504)]
    assert to(effects, Cancel) == []
    assert "decode-0" not in made.units.by_name or used(made) == (0, 0)


def test_the_unit_is_chosen_when_the_prompt_is_done() -> None:
    made = front()
    handle(made, UnitDown("decode-0", "died"))
    handle(made, UnitUp("decode-7", "decode", "d2", 20, 4))
    assert to(handle(made, first_token()), Decode) == ["decode-7"]

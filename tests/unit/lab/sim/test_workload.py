"""Columns of requests: blocks are named by session and position, and have equal names where their
texts are equal.
"""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.cache import num_names, slice_of, split
from hadal.lab.sim.workload import R1, V3, Parts, Workload, concatenate
from tests.unit.lab.sim.worlds import Row, of


def common(first: bytes, second: bytes) -> int:
    """Return the number of equal blocks at the beginning of two chains."""
    pairs = zip(split(first), split(second), strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a != b), min(num_names(first), num_names(second))
    )


def test_only_full_blocks_have_names_and_the_last_token_fills_none() -> None:
    lengths = [(128, 1), (127, 2), (100, 28), (100, 29), (63, 1)]
    load = of(*[Row(at, at, 0, *length) for at, length in enumerate(lengths)])
    assert [num_names(load.chain(at)) for at in range(5)] == [2, 1, 1, 1, 0]
    # The last of 128 tokens was drawn but never computed, so its block is not full.
    assert [num_names(load.chain(at, with_output=True)) for at in range(5)] == [2, 2, 1, 2, 0]


def test_without_reasoning_the_next_turn_goes_on_from_the_answer() -> None:
    # 100 + 300 tokens, then a message of 112.
    load = of(Row(0, 7, 0, 100, 300), Row(9, 7, 1, 512, 10, tokens_seen=399, idle_s=9))
    text, prompt = load.chain(0, with_output=True), load.chain(1)
    assert common(text, prompt) == num_names(text) == 6
    assert load.tokens_findable.tolist() == [0, 6 * 64]


def test_after_reasoning_the_next_turn_shares_the_prompt_only() -> None:
    # 200 of the 300 are reasoning: the next prompt is 100 + 100 + 112.
    first = Row(0, 7, 0, 200, 300, 200, model=R1)
    load = of(first, Row(9, 7, 1, 412, 10, tokens_seen=200, idle_s=9, model=R1))
    text, prompt = load.chain(0, with_output=True), load.chain(1)
    assert num_names(text) == 7
    assert common(text, prompt) == 3
    assert load.tokens_findable.tolist() == [0, 3 * 64]


def test_answers_after_reasoning_are_like_no_other_text() -> None:
    turns = [Row(at, 7, at, 64 * (at + 1), 640, 100, model=R1) for at in range(3)]
    load = of(*turns, Row(3, 8, 0, 64, 640, 100, model=R1))
    names = [set(split(load.chain(at, with_output=True)[16 * (at % 3 + 1) :])) for at in range(4)]
    assert all(len(own) >= 9 for own in names)
    assert len(set.union(*names)) == sum(map(len, names))


def test_a_system_prompt_is_shared_as_far_as_it_fills_blocks_by_sessions_with_the_same_model() -> (
    None
):
    rows = [
        Row(at, at, 0, 400, 9, prefix=2, prefix_tokens=200, tokens_seen=200, model=V3)
        for at in range(2)
    ]
    other_model = rows[0]._replace(session=5, model=R1)
    other_prompt = rows[0]._replace(session=6, prefix=1)
    load = of(*rows, other_model, other_prompt, Row(4, 9, 0, 400, 9))
    first = load.chain(0)
    assert [common(first, load.chain(at)) for at in range(5)] == [6, 3, 0, 0, 0]
    assert load.tokens_findable[0] == 3 * 64


def test_the_prompts_last_token_is_always_computed() -> None:
    load = of(Row(0, 0, 0, 128, 65), Row(1, 0, 1, 192, 5, tokens_seen=192, idle_s=1))
    assert load.tokens_findable.tolist() == [0, 128]


def test_parts_of_a_trace_are_named_by_the_traces_numbers() -> None:
    load = of(Row(0, 0, 0, 600, 500), Row(1, 1, 0, 1100, 5))
    parts = Parts(512, np.array([0, 2, 5]), np.array([4, 5, 4, 6, 7]))
    load = Workload(*[getattr(load, name) for name in list(load.__dataclass_fields__)[:-1]], parts)
    assert num_names(load.chain(0)) == 9
    assert common(load.chain(0), load.chain(1)) == 8
    assert num_names(load.chain(0, with_output=True)) == 17
    reversed_ = load.take(np.array([1, 0]))
    assert [reversed_.chain(0), reversed_.chain(1)] == [load.chain(1), load.chain(0)]
    assert load.take(np.array([False, True])).chain(0) == load.chain(1)


def test_a_sample_has_whole_sessions_and_about_as_many_as_asked_for() -> None:
    load = of(*[Row(at, at // 3, at % 3, 100, 10) for at in range(30_000)])
    sample = load.sample(10)
    sessions, counts = np.unique(sample.session, return_counts=True)
    assert set(counts.tolist()) == {3}
    assert 900 < len(sessions) < 1100
    assert set(load.sample(20).session) < set(sessions.tolist())
    assert len(load.sample(1)) == len(load)
    with pytest.raises(ValueError, match="at least 1"):
        load.sample(0)


def test_together_they_come_by_arrival() -> None:
    one, other = of(Row(1, 0, 0, 10, 1), Row(3, 1, 0, 30, 1)), of(Row(2, 2, 0, 20, 1))
    both = concatenate([one, other])
    assert both.tokens_in.tolist() == [10, 20, 30]
    assert slice_of(both.chain(0), 0, 1) == b""


def test_the_mean_kv_length_is_weighted_by_output_tokens() -> None:
    load = of(Row(0, 0, 0, 100, 10), Row(0, 1, 0, 1000, 30))
    assert load.kv_length_mean == pytest.approx((10 * 105 + 30 * 1015) / 40)

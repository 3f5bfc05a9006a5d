"""pack_chunks: within the budget, in order, without overtaking."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hadal.policy.batching import AGE_S, pack_chunks, turn_s
from hadal.policy.views import PromptView


def test_a_long_prompt_takes_the_rest_of_the_budget() -> None:
    prompts = [PromptView(10, 0), PromptView(100, 2), PromptView(5, 1)]
    assert pack_chunks(prompts, 64, 9, 9) == [10, 54]


def test_short_prompts_share_a_step() -> None:
    assert pack_chunks([PromptView(10, 1)] * 4, 64, 9, 9) == [10, 10, 10, 10]


def test_a_prompt_without_blocks_stops_those_behind_it() -> None:
    assert pack_chunks([PromptView(10, 1), PromptView(10, 5), PromptView(10, 1)], 64, 4, 9) == [10]


def test_started_prompts_go_on_when_no_other_may_start() -> None:
    assert pack_chunks([PromptView(10, 0), PromptView(10, 1)], 64, 9, 0) == [10]


@given(st.floats(0, 1e6), st.integers(-4, 4), st.integers(-4, 4))
def test_whoever_waited_longer_than_a_priority_is_worth_is_first(
    at_s: float, low: int, high: int
) -> None:
    late_s = at_s + AGE_S * abs(high - low)
    assert turn_s(at_s, low) < turn_s(late_s + 1e-3, high)
    assert turn_s(at_s, 1) < turn_s(at_s, 0) < turn_s(at_s + 1e-3, 0)


prompt_lists = st.lists(st.builds(PromptView, st.integers(1, 50), st.integers(0, 4)), max_size=12)


@given(prompt_lists, st.integers(1, 80), st.integers(0, 12), st.integers(0, 6))
def test_limits_hold_and_the_first_stop_ends_it(
    prompts: list[PromptView], budget: int, blocks: int, starts: int
) -> None:
    sizes = pack_chunks(prompts, budget, blocks, starts)
    taken = prompts[: len(sizes)]
    started = [prompt for prompt in taken if prompt.num_blocks_needed]
    assert sum(sizes) <= budget
    assert sum(prompt.num_blocks_needed for prompt in started) <= blocks
    assert len(started) <= starts
    assert all(0 < size <= prompt.num_tokens for size, prompt in zip(sizes, taken, strict=True))
    # Only the last prompt may be cut, and only by the budget.
    assert all(
        size == prompt.num_tokens for size, prompt in zip(sizes[:-1], taken[:-1], strict=True)
    )
    if sizes and sizes[-1] < taken[-1].num_tokens:
        assert sum(sizes) == budget
    if len(sizes) < len(prompts) and sum(sizes) < budget:
        blocked = prompts[len(sizes)]
        assert (
            blocked.num_blocks_needed > blocks - sum(p.num_blocks_needed for p in started)
            or len(started) == starts
        )

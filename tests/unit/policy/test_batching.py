"""pack_chunks: budget kept, order kept, nobody overtaken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hadal.policy.admission import AGE_S, in_turns, pack_chunks, turn_s
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


def test_nothing_waits_nothing_is_packed() -> None:
    assert pack_chunks([], 64, 9, 9) == []


@given(st.floats(0, 1e6), st.integers(-4, 4), st.integers(-4, 4))
def test_whoever_waited_longer_than_a_priority_is_worth_is_first(
    at_s: float, low: int, high: int
) -> None:
    late_s = at_s + AGE_S * abs(high - low)
    assert turn_s(at_s, low) < turn_s(late_s + 1e-3, high)
    assert turn_s(at_s, 1) < turn_s(at_s, 0) < turn_s(at_s + 1e-3, 0)


def turns(waiting: list[tuple[str, int]], **held: int) -> str:
    return "".join(tenant for tenant, _ in in_turns(waiting, lambda one: one, held))


def test_tenants_take_turns_and_whoever_holds_least_is_next() -> None:
    waiting = [(tenant, 0) for tenant in "aaaaabbc"]
    assert turns(waiting) == "abcabaaa"
    assert turns(waiting, a=2) == "bcbaaaaa" == turns(waiting, a=2, d=9)
    assert turns(waiting, a=9, b=9, c=9) == "abcabaaa"


def test_a_priority_weighs_its_tenant_and_starves_nobody() -> None:
    assert turns([("a", 4)] * 7 + [("b", 0)] * 3) == "abaaaaabab"
    assert turns([("a", -4)] * 2 + [("b", 0)] * 2) == "abab", (
        "less than 0 is its tenant's own affair"
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.just(0)), max_size=20))
def test_one_tenant_s_order_stays_and_none_is_ahead_by_more_than_one(
    waiting: list[tuple[str, int]],
) -> None:
    numbered = list(enumerate(waiting))
    got = list(in_turns(numbered, lambda one: one[1], {}))
    for tenant in "abc":
        assert [one for one in got if one[1][0] == tenant] == [
            one for one in numbered if one[1][0] == tenant
        ]
    for end in range(len(got)):
        left = {one[1][0] for one in got[end:]}
        counts = [sum(one[1][0] == tenant for one in got[:end]) for tenant in left]
        assert not counts or max(counts) - min(counts) <= 1


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
    # Only the last may be cut, and only by the budget.
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

"""prefill_balance: equal time within one token; caps and order kept; equal inputs, equal plans."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.rates import StepRates
from hadal.policy.prefill_balance import (
    HEAD_SHARE,
    LOOK_AHEAD,
    PrefillQueueView,
    RankCut,
    StepCut,
    cut_rank,
    look_ahead,
    plan_step,
)
from hadal.policy.prefill_budget import DRAIN, StepLimits, predict, step_budget_s
from hadal.policy.prefill_rates import cost_s
from hadal.policy.views import PromptView

RATES = StepRates(3.3e-5, 1e-8, 2e-5)
LIMITS = StepLimits(8192, 16384)

prompt_lists = st.lists(
    st.builds(PromptView, st.integers(1, 40_000), st.just(0), st.integers(0, 120_000)), max_size=6
)
waiting_lists = st.lists(
    st.builds(PromptView, st.integers(1, 40_000), st.integers(1, 9), st.integers(0, 9_000)),
    max_size=12,
)
rates = st.builds(
    StepRates,
    st.floats(1e-6, 1e-3),
    st.sampled_from([0.0, 1e-10, 1e-8, 1e-6]),
    st.floats(0, 1e-4),
    st.sampled_from([0.0, 1e-3, 1.0]),
)
limits = st.tuples(st.integers(1, 9000), st.integers(0, 9000)).map(
    lambda pair: StepLimits(pair[0], sum(pair))
)
rank_lists = st.lists(
    st.tuples(prompt_lists, st.integers(0, 40), st.integers(0, 4)), max_size=5
).map(
    lambda ranks: [
        PrefillQueueView(2 * at, tuple(p), blocks, starts)
        for at, (p, blocks, starts) in enumerate(ranks)
    ]
)


def time_s(prompts: Sequence[PromptView], sizes: Sequence[int], of: StepRates) -> float:
    return sum(of.chunk_s(p.num_context, n) for p, n in zip(prompts, sizes, strict=True) if n)


def prompts_of(
    view: PrefillQueueView, cut: RankCut, waiting: Sequence[PromptView]
) -> list[PromptView]:
    return [*view.prompts, *(waiting[index] for index in cut.starts)]


@given(prompt_lists, rates, st.floats(1e-4, 10), limits)
def test_a_rank_takes_its_time_within_one_token(
    prompts: list[PromptView], of: StepRates, budget_s: float, limit: StepLimits
) -> None:
    sizes, taken_s = cut_rank(prompts, of, budget_s, limit.num_tokens_mean, limit.num_tokens_max)
    assert taken_s == pytest.approx(time_s(prompts, sizes, of), abs=1e-9 * budget_s)
    assert all(0 <= n <= p.num_tokens for n, p in zip(sizes, prompts, strict=True))
    assert sum(sizes) <= limit.num_tokens_max
    if prompts:
        head, size = prompts[0], sizes[0]
        is_all = size == min(head.num_tokens, limit.num_tokens_max)
        share_s = HEAD_SHARE * budget_s * (1 - 1e-9)
        assert size >= 1
        assert is_all or of.chunk_s(head.num_context, size + 1) >= share_s
    assert taken_s <= budget_s * (1 + 1e-9) or sum(sizes) == 1
    if sum(sizes) < limit.num_tokens_max:
        for prompt, size in zip(prompts, sizes, strict=True):
            if size < prompt.num_tokens:
                assert taken_s + of.chunk_s(prompt.num_context + size, 1) > budget_s * (1 - 1e-9)


@given(rank_lists, waiting_lists, rates, limits)
def test_a_step_keeps_every_limit_and_the_order(
    views: list[PrefillQueueView], waiting: list[PromptView], of: StepRates, limit: StepLimits
) -> None:
    step = plan_step(views, waiting, of, limit)
    assert step == plan_step(views, waiting, of, limit)
    assert [cut.rank for cut in step.ranks] == [view.rank for view in views]
    started = sorted(index for cut in step.ranks for index in cut.starts)
    assert started == list(range(len(started))), "somebody was overtaken"
    assert 0 < step.efficiency <= 1 + 1e-9
    works: list[tuple[float, int]] = []
    for view, cut in zip(views, step.ranks, strict=True):
        prompts = prompts_of(view, cut, waiting)
        assert list(cut.starts) == sorted(cut.starts)
        assert len(cut.starts) <= view.num_starts_free
        assert sum(waiting[index].num_blocks_needed for index in cut.starts) <= view.num_blocks_free
        assert sum(cut.sizes) <= min(step.cap_tokens, limit.num_tokens_max)
        assert not prompts or cut.sizes[0] >= 1, "the oldest must get on"
        assert time_s(prompts, cut.sizes, of) <= step.budget_s * (1 + 1e-9) or sum(cut.sizes) == 1
        works.append((time_s(prompts, cut.sizes, of), sum(cut.sizes)))
        assert (
            list(cut.sizes)
            == cut_rank(prompts, of, step.budget_s, limit.num_tokens_mean, step.cap_tokens)[0]
        )
    assert not views or step.efficiency == pytest.approx(predict(works, of), rel=1e-6)


@given(rank_lists.filter(bool), waiting_lists, rates)
def test_only_the_first_that_fits_nowhere_stops_starts(
    views: list[PrefillQueueView], waiting: list[PromptView], of: StepRates
) -> None:
    """Check that every idle rank with enough free blocks and a free start gets a prompt while any waits."""
    step = plan_step(views, waiting, of, LIMITS)
    num_started = sum(len(cut.starts) for cut in step.ranks)
    if num_started < len(waiting):
        for view, cut in zip(views, step.ranks, strict=True):
            used = sum(waiting[index].num_blocks_needed for index in cut.starts)
            fits = waiting[num_started].num_blocks_needed <= view.num_blocks_free - used
            assert view.prompts or cut.starts or not fits or not view.num_starts_free


def run_on(
    queues: list[list[PromptView]], step: StepCut, waiting: list[PromptView]
) -> list[PromptView]:
    """Apply a step; return the prompts that are still queued."""
    for at, cut in enumerate(step.ranks):
        prompts = queues[at] + [waiting[index] for index in cut.starts]
        queues[at] = [
            PromptView(p.num_tokens - n, 0, p.num_context + n)
            for p, n in zip(prompts, cut.sizes, strict=True)
            if n < p.num_tokens
        ]
    return waiting[sum(len(cut.starts) for cut in step.ranks) :]


def views_of(queues: Sequence[Sequence[PromptView]]) -> list[PrefillQueueView]:
    return [PrefillQueueView(rank, tuple(prompts), 99, 9) for rank, prompts in enumerate(queues)]


@given(waiting_lists.filter(bool), rates)
def test_everybody_is_done_in_the_end(waiting: list[PromptView], of: StepRates) -> None:
    queues: list[list[PromptView]] = [[], [], []]
    most_steps = 20 + sum(prompt.num_tokens for prompt in waiting) // 100
    for _ in range(most_steps):
        if not waiting and not any(queues):
            return
        waiting = run_on(queues, plan_step(views_of(queues), waiting, of, LIMITS), waiting)
    pytest.fail(f"not done after {most_steps} steps")


def test_a_dense_prompt_is_not_starved_by_a_stream_of_light_ones() -> None:
    queues: list[list[PromptView]] = [[PromptView(60_000, 0, 60_000)], [], []]
    num_left = []
    for _ in range(400):
        waiting = [PromptView(1000, 16, 0)] * 40
        run_on(queues, plan_step(views_of(queues), waiting, RATES, LIMITS), waiting)
        head = queues[0][0]
        if head.num_context < 60_000:
            break
        assert not num_left or head.num_tokens < num_left[-1]
        num_left.append(head.num_tokens)
    else:
        pytest.fail(f"the dense prompt has {num_left[-1]} tokens left after 400 steps")


def test_dense_and_light_ranks_take_equal_time_where_equal_tokens_would_not() -> None:
    views = [
        PrefillQueueView(0, (PromptView(30_000, 0, 80_000),), 9, 9),
        PrefillQueueView(1, (PromptView(30_000, 0, 20_000),), 9, 9),
    ]
    step = plan_step(views, [], RATES, LIMITS)
    times_s = [
        time_s(view.prompts, cut.sizes, RATES) for view, cut in zip(views, step.ranks, strict=True)
    ]
    assert times_s == pytest.approx([step.budget_s] * 2, abs=RATES.chunk_s(110_000, 1))
    equal_tokens = predict([(time_s(view.prompts, [8192], RATES), 8192) for view in views], RATES)
    assert step.efficiency > equal_tokens + 0.2


def test_light_prompts_beside_a_dense_one_make_up_its_tokens() -> None:
    prompts = [PromptView(30_000, 0, 80_000), *[PromptView(2000, 0, 0)] * 5]
    budget_s = 2.0
    assert sum(cut_rank(prompts[:1], RATES, budget_s, 8192, 16384)[0]) < 3000
    sizes, _ = cut_rank(prompts, RATES, budget_s, 8192, 16384)
    assert sum(sizes) == pytest.approx(8192, abs=30)  # Light prompts add the other tokens.
    assert sizes[0] > 1500
    assert time_s(prompts, sizes, RATES) == pytest.approx(budget_s, abs=RATES.chunk_s(82_000, 1))


@pytest.mark.parametrize("num_missing", [1, 2, 3])
def test_time_too_short_for_a_dense_token_goes_to_light_ones(num_missing: int) -> None:
    prompts = [PromptView(2000, 0, 20_000), PromptView(3000, 0, 120_000), PromptView(500, 0, 0)]
    budget_s = RATES.chunk_s(20_000, 2000) + 0.99 * RATES.chunk_s(120_000, 1)
    # The first prompt is taken whole. The time left is too short for a token of the second, so the few
    # missing tokens come from the third.
    goal = 2000 + num_missing
    assert cut_rank(prompts, RATES, budget_s, goal, goal)[0] == [2000, 0, num_missing]


def test_arrivals_start_where_the_predicted_cost_is_least() -> None:
    """Compare queues: the one with fewer tokens has so much context that it costs more."""
    short_and_dense, long_and_light = PromptView(1000, 0, 120_000), PromptView(4000, 0, 0)
    assert cost_s(short_and_dense, RATES) > cost_s(long_and_light, RATES)
    views = views_of([[short_and_dense], [long_and_light]])
    step = plan_step(views, [PromptView(500, 8, 0)], RATES, LIMITS)
    assert [cut.starts for cut in step.ranks] == [(), (0,)]


def test_no_pairs_means_equal_tokens() -> None:
    step = plan_step(
        views_of([[PromptView(30_000, 0, 9_000)], [PromptView(40_000, 0, 0)]]),
        [],
        StepRates(1e-5, 0.0),
        LIMITS,
    )
    sizes = [sum(cut.sizes) for cut in step.ranks]
    assert abs(sizes[0] - sizes[1]) <= 1


def test_a_step_that_costs_much_beside_its_work_is_longer() -> None:
    """A higher fixed cost makes steps longer, with a small queue and where dense prompts would shorten them."""
    cheap, dear = (StepRates(3.3e-5, 1e-8, 2e-5, step_s) for step_s in (0.0, 1.0))
    little = [PromptView(9000, 0)]
    assert step_budget_s(little, 32, cheap, 8192) < step_budget_s(little, 32, dear, 8192)
    random = Random(5)
    budgets_s = {0.0: 0.0, 1.0: 0.0}
    for _ in range(30):
        queues = [
            [
                PromptView(random.randint(500, 60_000), 0, random.choice([0, 0, 60_000]))
                for _ in range(4)
            ]
            for _ in range(8)
        ]
        short, long = (plan_step(views_of(queues), [], rates, LIMITS) for rates in (cheap, dear))
        assert long.efficiency < short.efficiency  # The fixed cost is no work.
        budgets_s[0.0] += short.budget_s
        budgets_s[1.0] += long.budget_s
    assert budgets_s[1.0] > 1.05 * budgets_s[0.0]


def test_prompts_of_one_kind_are_not_overtaken() -> None:
    """Queue a prompt barely denser than the others: it keeps its place, as passing it gains nothing."""
    prompts = [PromptView(900, 0, 100), *[PromptView(500, 0, 0)] * 9]
    sizes, _ = cut_rank(prompts, RATES, RATES.chunk_s(100, 400), 8192, 16384)
    assert sizes == [400, *[0] * 9]


def test_a_plan_sees_enough_to_fill_a_step_and_no_more() -> None:
    seen = look_ahead(iter([1000] * 10_000), 4, StepLimits(500, 800), lambda num_tokens: num_tokens)
    assert len(seen) == LOOK_AHEAD * 4 * 500 / 1000
    assert LOOK_AHEAD * DRAIN >= 1
    assert look_ahead([5, 6], 4, LIMITS, lambda num_tokens: num_tokens) == [5, 6]


def test_nothing_to_do_is_an_empty_step() -> None:
    assert plan_step([], [PromptView(5, 1)], RATES, LIMITS).ranks == ()
    step = plan_step(views_of([[], []]), [], RATES, LIMITS)
    assert [(cut.starts, cut.sizes) for cut in step.ranks] == [((), ()), ((), ())]
    assert step.efficiency == 1


def test_a_prompt_goes_where_its_prefix_is_unless_others_have_less_to_do() -> None:
    cold, there = PromptView(3_000, 50), {2: PromptView(200, 6, 2_800)}
    near, far = (views_of([[], [], [PromptView(length, 0)]]) for length in (1_000, 30_000))
    found = [cut.starts for cut in plan_step(near, [cold], RATES, LIMITS, [there]).ranks]
    assert found == [(), (), (0,)]
    assert [cut.starts for cut in plan_step(far, [cold], RATES, LIMITS, [there]).ranks][2] == ()
    step = plan_step(near, [cold, cold], RATES, LIMITS, [there, {}])
    assert step.ranks[2].starts == (0,)
    assert step.ranks[0].starts == (1,), "another, of which nothing is known, is not drawn along"


def test_what_is_being_read_takes_its_place_and_nothing_of_the_step() -> None:
    reading = PromptView(2_000, 3, 640, num_loading=10)
    views = [PrefillQueueView(0, (reading,), 99, 9), PrefillQueueView(1, (), 99, 9)]
    step = plan_step(
        views, [PromptView(300, 5), reading], RATES, LIMITS, [{}, {0: reading, 1: reading}]
    )
    assert [(cut.starts, cut.sizes) for cut in step.ranks] == [((), (0,)), ((0, 1), (300, 0))]
    with_nothing = plan_step(views, [reading], RATES, LIMITS, [{1: reading}])
    assert [(cut.starts, cut.sizes) for cut in with_nothing.ranks] == [((), (0,)), ((0,), (0,))]


def test_who_has_some_of_it_needs_fewer_blocks() -> None:
    views = [PrefillQueueView(0, (), 5, 9), PrefillQueueView(1, (), 5, 9)]
    step = plan_step(views, [PromptView(600, 10)], RATES, LIMITS, [{1: PromptView(280, 5, 320)}])
    assert [cut.starts for cut in step.ranks] == [(), (0,)]

"""Test StepScheduler: a schedule by name or by price, one decision for all ranks, equal parts."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.plans import OpTime
from hadal.perf.costs import MicroBatchWork
from hadal.policy.prefill_rates import PAIRS_PER_TOKEN
from hadal.roles.unit.schedule import StepScheduler

SECONDS = {
    "attn_in": 1e-3,
    "attn_core": 1e-3,
    "gate": 1e-4,
    "shared": 1e-3,
    "experts": 2e-3,
    "post": 1e-5,
}


def times(tokens: int, link_s: float, num_layers: int = 8) -> tuple[OpTime, ...]:
    """Return times of a step in which everything grows with the tokens."""
    op_to_seconds = SECONDS | {"dispatch": link_s, "combine": link_s}
    return tuple(
        OpTime(op, num_layers, seconds * num_layers * tokens / 64 * (4 if op == "post" else 1))
        for op, seconds in op_to_seconds.items()
    )


def learned(link_s: float) -> StepScheduler:
    scheduler = StepScheduler(4, min_split_tokens=8, num_layers=8, num_moe_layers=8)
    for step in range(60):
        tokens = (16, 32, 64)[step % 3]
        scheduler.costs.observe([MicroBatchWork(tokens, 100 * tokens)], times(tokens, link_s))
    return scheduler


def test_a_fixed_schedule_has_two_micro_batches_once_the_busiest_rank_has_enough() -> None:
    scheduler = StepScheduler(2, "decode_five", 16)
    chosen = [
        scheduler.choose(step, [(3, 30), (tokens, 50)]) for step, tokens in enumerate((15, 16))
    ]
    found = [(c.schedule, c.num_micro_batches) for c in chosen]
    assert found == [("sequential", 1), ("decode_five", 2)]
    assert chosen[1].works == (MicroBatchWork(8, 25), MicroBatchWork(8, 25))
    assert StepScheduler(1, "prefill_dual", 2).choose(0, [(2, 3)]).schedule == "prefill_dual"
    assert StepScheduler(1, "prefill_dual", 0).choose(0, [(1, 1)]).num_micro_batches == 1


@pytest.mark.promise(
    "takes the cheapest schedule for the step at hand, which for small steps is "
    "sequential with one micro-batch"
)
def test_auto_overlaps_where_the_link_is_slow_and_not_where_it_costs_nothing() -> None:
    assert learned(4e-3).choose(0, [(64, 6400), (10, 100), (0, 0), (5, 5)]).num_micro_batches == 2
    free = learned(0.0).choose(0, [(64, 6400), (10, 100), (0, 0), (5, 5)])
    assert (free.schedule, free.num_micro_batches) == ("sequential", 1)


@pytest.mark.promise(
    "takes the cheapest schedule for the step at hand, which for small steps is "
    "sequential with one micro-batch"
)
def test_auto_stays_sequential_alone_when_small_and_before_anything_was_seen() -> None:
    fresh = StepScheduler(4, num_layers=8, num_moe_layers=8)
    assert fresh.choose(0, [(500, 9000)] * 4).num_micro_batches == 1
    assert learned(4e-3).choose(0, [(7, 700)] * 4).num_micro_batches == 1
    assert (
        StepScheduler(1, num_layers=8, num_moe_layers=8).choose(0, [(500, 9000)]).num_micro_batches
        == 1
    )


def test_what_is_seen_is_noted_under_the_step_that_took_it() -> None:
    scheduler = StepScheduler(2, num_layers=8, num_moe_layers=8)
    scheduler.choose(0, [(64, 640), (0, 0)])
    scheduler.done(0, times(64, 1e-3))
    scheduler.done(0, times(64, 1e-3))  # A step is observed once.
    scheduler.choose(1, [(64, 640), (0, 0)])
    scheduler.reset()
    scheduler.done(1, times(64, 1e-3))
    assert scheduler.costs.num_steps == 1


def test_parts_are_about_equal() -> None:
    scheduler = learned(1e-3)
    assert scheduler.second_rows(np.full((2, 7), 100), np.ones((2, 7), np.bool_)).sum(
        axis=1
    ).tolist() == [3, 3]
    first = scheduler.cut_chunks([(0, 100), (50, 100)])
    assert 80 <= sum(first) <= 130
    assert first[0] == 100
    with pytest.raises(ValueError, match="use one of auto"):
        StepScheduler(2, "faster")


def test_micro_batches_are_equal_with_what_experts_do_for_them() -> None:
    """Pairs cost about as much as tokens here, and experts more than the rest of a token's work."""
    scheduler = StepScheduler(4, num_layers=8, num_moe_layers=8)
    for step in range(60):
        tokens, pairs = 32 << step % 3, 4000 << step % 5
        seconds = {"attn_in": 1e-5 * tokens, "attn_core": 1e-7 * pairs, "experts": 4e-5 * tokens}
        scheduler.costs.observe(
            [MicroBatchWork(tokens, pairs)],
            [OpTime(op, 8, 8 * each_s) for op, each_s in seconds.items()],
        )
    rates, chunks = scheduler.rates, [(900, 100), (0, 400)]
    first = scheduler.cut_chunks(chunks)
    assert first[0] == 100
    assert 0 < first[1] < 400

    def whole_s(parts: list[tuple[int, int]]) -> float:
        return sum(rates.whole_s(start, num_tokens) for start, num_tokens in parts)

    halves_s = whole_s([(900, 100), (0, first[1])]), whole_s([(first[1], 400 - first[1])])
    assert halves_s[0] == pytest.approx(halves_s[1], abs=rates.whole_s(400, 1))


def test_a_rank_alone_has_all_tokens_of_its_experts() -> None:
    alone, many = (StepScheduler(num_ranks, num_layers=8, num_moe_layers=8) for num_ranks in (1, 4))
    for scheduler in (alone, many):
        for tokens in (16, 32, 64) * 4:
            scheduler.costs.observe([MicroBatchWork(tokens, 100 * tokens)], times(tokens, 1e-3))
    assert many.rates.mean_s > 0
    found = (alone.rates.token_s, alone.rates.mean_s)
    assert found == (many.rates.token_s + many.rates.mean_s, 0.0)
    assert alone.rates.all_token_s == pytest.approx(many.rates.all_token_s)


def test_rates_are_sane_before_and_measured_after() -> None:
    fresh = StepScheduler(4, num_layers=8, num_moe_layers=8)
    assert not fresh.is_calibrated
    assert fresh.rates.pair_s * PAIRS_PER_TOKEN == pytest.approx(fresh.rates.token_s)
    scheduler = learned(1e-3)
    assert scheduler.is_calibrated
    assert 1e-4 < scheduler.rates.token_s < 2e-3
    assert scheduler.rates.dispatch_s > 0
    silent = StepScheduler(4, num_layers=8, num_moe_layers=8)
    silent.costs.observe([MicroBatchWork(8, 80)], [OpTime("attn_in", 8, 0.0)])
    assert not silent.is_calibrated
    assert silent.rates == fresh.rates

"""Op times learned from steps: errors, unseen sizes, and the schedule chosen by them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import astuple

import pytest

from hadal.core.plans import OpTime
from hadal.overlap.plan import DECODE_FIVE, PREFILL_DUAL, SCHEDULES, SEQUENTIAL, Schedule
from hadal.perf.costs import (
    EVERY_LAYER,
    MAX_BINS,
    NUM_POSTS,
    OPS,
    POST,
    MicroBatchWork,
    StepCosts,
    choose,
    halve_works,
    step_s,
)
from hadal.perf.price import price
from tests.fresh import fresh

NUM_LAYERS, NUM_MOE_LAYERS = 8, 7
Truth = dict[str, tuple[float, float, float]]
"""op -> (fixed, per token, per pair), us."""

LINEAR: Truth = {
    "attn_in": (50, 1, 0),
    "attn_core": (20, 0.5, 0.01),
    "gate": (5, 0.1, 0),
    "shared": (10, 0.5, 0),
    "experts": (100, 1, 0),
    "dispatch": (30, 2, 0),
    "combine": (30, 4, 0),
    "post": (5, 0.1, 0),
}
FIXED: Truth = LINEAR | {
    "attn_in": (500, 0.01, 0),
    "experts": (2000, 0.01, 0),
    "dispatch": (100, 0.1, 0),
    "combine": (100, 0.2, 0),
}
"""Times of a batch so small that reading weights dominates: halving it gains nothing."""


def seconds_of(truth: Truth, op: str, work: MicroBatchWork) -> float:
    fixed, per_token, per_pair = truth[op]
    return (fixed + per_token * work.num_tokens + per_pair * work.num_pairs) * 1e-6


def step(
    truth: Truth, works: Sequence[MicroBatchWork], rng: random.Random, noise: float = 0.1
) -> list[OpTime]:
    times = []
    for op in truth:
        num = (NUM_LAYERS if op in EVERY_LAYER else NUM_MOE_LAYERS) * (
            NUM_POSTS if op == POST else 1
        )
        seconds = sum(seconds_of(truth, op, work) for work in works) * num
        times.append(OpTime(op, num * len(works), seconds * rng.uniform(1 - noise, 1 + noise)))
    return times


def new() -> StepCosts:
    return StepCosts(NUM_LAYERS, NUM_MOE_LAYERS)


def check(costs: StepCosts, truth: Truth, work: MicroBatchWork, within: float) -> None:
    estimate = costs.op_seconds(work)
    for op in OPS:
        assert getattr(estimate, op) == pytest.approx(seconds_of(truth, op, work), rel=within), op


@pytest.mark.parametrize("seed", [0, 1, fresh().randrange(2**32)])
def test_learns_from_steps_of_many_sizes(seed: int) -> None:
    rng = random.Random(seed)
    costs = new()
    for _ in range(400):
        num_tokens = rng.randint(16, 512)
        costs.observe(
            [work := MicroBatchWork(num_tokens, num_tokens * rng.randint(50, 300))],
            step(LINEAR, [work], rng),
        )
    for num_tokens in (32, 128, 512):
        check(costs, LINEAR, MicroBatchWork(num_tokens, num_tokens * 150), 0.2)


def test_two_micro_batches_are_two_executions() -> None:
    rng = random.Random(0)
    costs = new()
    for num_tokens in (32, 64, 128, 256) * 5:
        works = [
            MicroBatchWork(num_tokens, num_tokens * 100),
            MicroBatchWork(num_tokens / 2, num_tokens * 10),
        ]
        costs.observe(works, step(LINEAR, works, rng, 0.0))
    check(costs, LINEAR, MicroBatchWork(100, 8000), 0.05)


def test_halves_are_sane_when_only_full_batches_were_seen() -> None:
    """Estimate halves from full batches: 0.5 to 0.6 of the time; close once halves ran."""
    rng = random.Random(0)
    whole = MicroBatchWork(256, 256 * 150)
    halves = halve_works(whole)
    for truth in (LINEAR, FIXED):
        costs = new()
        for _ in range(1000):
            costs.observe([whole], step(truth, [whole], rng, 0.02))
        full, half = costs.op_seconds(whole), costs.op_seconds(halves[0])
        for op in OPS:
            assert 0.5 <= getattr(half, op) / getattr(full, op) <= 0.6
        costs.observe(halves, step(truth, halves, rng, 0.0))
        check(costs, truth, halves[0], 0.15)
        # Measured halves are not forgotten while only full batches run.
        for _ in range(1000):
            costs.observe([whole], step(truth, [whole], rng, 0.02))
        check(costs, truth, halves[0], 0.15)


def test_follows_a_machine_that_slows_down() -> None:
    rng = random.Random(0)
    costs = new()
    works = [MicroBatchWork(n, n * 100) for n in (64, 128, 256)]
    slow = {op: (2 * a, 2 * b, 2 * c) for op, (a, b, c) in LINEAR.items()}
    for truth in (LINEAR, slow):
        for _ in range(40):
            for work in works:
                costs.observe([work], step(truth, [work], rng, 0.02))
        check(costs, truth, works[1], 0.1)


def test_one_hiccup_does_not_turn_the_table() -> None:
    rng = random.Random(0)
    costs = new()
    work = MicroBatchWork(128, 12800)
    for _ in range(20):
        costs.observe([work], step(LINEAR, [work], rng, 0.0))
    before = astuple(costs.op_seconds(work))
    costs.observe([work], [OpTime(op, 1, 10.0) for op in OPS])
    after = astuple(costs.op_seconds(work))
    assert all(b <= 1.45 * a for a, b in zip(before, after, strict=True))


def test_never_negative_and_never_falling() -> None:
    """Feed random times: an op that seems faster for more tokens is noise, so estimates never fall."""
    rng = random.Random(5)
    costs = new()
    for _ in range(300):
        n = rng.randint(1, 300)
        times = [OpTime(op, 8, rng.random() / n) for op in OPS]
        costs.observe([MicroBatchWork(n, rng.randint(0, 100_000))], times)
        small = costs.op_seconds(MicroBatchWork(1, 1))
        large = costs.op_seconds(MicroBatchWork(300, 100_000))
        assert all(0 <= a <= b for a, b in zip(astuple(small), astuple(large), strict=True))
    for schedule, num in ((SEQUENTIAL, 1), (PREFILL_DUAL, 2)):
        found = costs.rates(schedule, num)
        assert found is None or min(astuple(found)) >= 0


def test_odd_steps_are_ignored() -> None:
    costs = new()
    costs.observe([], [OpTime("attn_in", 1, 1.0)])
    costs.observe([MicroBatchWork(0, 0)], [OpTime("attn_in", 1, 1.0)])
    costs.observe([MicroBatchWork(8, 8)], [OpTime("idle", 1, 1.0)])
    costs.observe([MicroBatchWork(8, 8)], [])
    assert costs.num_steps == 0
    assert set(astuple(costs.op_seconds(MicroBatchWork(8, 8)))) == {0.0}
    assert costs.rates() is None
    for i in range(200):
        costs.observe(
            [MicroBatchWork(2.0 ** (i % 20), 3.0 ** (i % 17))], [OpTime("attn_in", 1, 1e-3)]
        )
    assert len(costs._bins) <= MAX_BINS
    with pytest.raises(ValueError, match="num_moe_layers is 9; there are 8 layers"):
        StepCosts(8, 9)


def test_rates_are_sums_over_layers() -> None:
    rng = random.Random(0)
    costs = new()
    for _ in range(10):
        for n, length in [(32, 10), (64, 500), (256, 100), (512, 20), (128, 900)]:
            costs.observe([work := MicroBatchWork(n, n * length)], step(LINEAR, [work], rng, 0.0))
    rates = costs.rates()
    assert rates.token_s == pytest.approx((8 * 2 + 7 * 0.1) * 1e-6, rel=0.1)
    assert rates.mean_s == pytest.approx(7 * 1e-6, rel=0.1), "experts compute what all ranks send"
    assert rates.pair_s == pytest.approx(8 * 0.01e-6, rel=0.1)


def test_where_only_experts_take_longer_for_more_tokens_they_are_a_tokens_price() -> None:
    rng = random.Random(0)
    costs = new()
    for n in (16, 32, 64) * 10:
        truth = {
            "attn_in": (100.0 - n, 0.0, 0.0),
            "attn_core": (100.0 - n, 0.0, 0.0),
            "experts": (10.0, 1.0, 0.0),
        }
        costs.observe([work := MicroBatchWork(n, 100 * n)], step(truth, [work], rng, 0.0))
    rates = costs.rates()
    assert rates is not None
    assert (rates.token_s, rates.mean_s) == (pytest.approx(7 * 1e-6, rel=0.1), 0.0)


@pytest.mark.parametrize(("schedule", "num"), [(SEQUENTIAL, 1), (PREFILL_DUAL, 2)])
def test_rates_add_up_to_the_price_of_a_step(schedule: Schedule, num: int) -> None:
    """Compare rates with prices: the rest of a step is the exposed link, posting, fixed cost."""
    rng = random.Random(1)
    costs = new()
    for _ in range(10):
        for n, length in [(200, 100), (260, 50), (300, 120), (220, 140)]:
            costs.observe(
                [work := MicroBatchWork(n, n * length)] * num, step(FIXED, [work] * num, rng, 0.0)
            )
    rates = costs.rates(schedule, num)
    for by in (0.6, 1.0, 1.4):
        n, pairs = 245 * by, 245 * 102 * by
        priced_s = step_s(costs, schedule, [MicroBatchWork(n, pairs)] * num, costs.num_layers)
        line_s = rates.step_s + num * (n * rates.all_token_s + pairs * rates.pair_s)
        assert line_s == pytest.approx(priced_s, rel=0.05)
    assert rates.step_s > 0


def test_a_link_that_is_hidden_costs_no_token_anything() -> None:
    rng = random.Random(1)
    slow, fast = (
        {**LINEAR, "dispatch": (0.0, link, 0.0), "combine": (0.0, link, 0.0)}
        for link in (40.0, 2.0)
    )
    exposed, hidden = (
        learned.rates(PREFILL_DUAL, 2).dispatch_s
        for learned in (_learned(truth, rng) for truth in (slow, fast))
    )
    assert hidden < 0.2 * exposed
    assert _learned(slow, rng).rates(SEQUENTIAL, 1).dispatch_s > exposed


def _learned(truth: dict[str, tuple[float, float, float]], rng: random.Random) -> StepCosts:
    costs = new()
    for n in (100, 200, 300, 400) * 5:
        costs.observe([work := MicroBatchWork(n, n * 100)], step(truth, [work], rng, 0.0))
    return costs


# ---- choose ----
ALLOWED = tuple(SCHEDULES.values())
WHOLE = MicroBatchWork(512, 512 * 150)


def learned(truth: Truth, num_steps: int = 30) -> StepCosts:
    rng = random.Random(0)
    costs = new()
    for _ in range(num_steps):
        for works in ([WHOLE], list(halve_works(WHOLE))):
            costs.observe(works, step(truth, works, rng, 0.01))
    return costs


def pick(costs: StepCosts, current: str | None = None, hysteresis: float = 0.03) -> tuple[str, int]:
    schedule, num = choose(
        costs,
        WHOLE,
        halve_works(WHOLE),
        num_layers=NUM_LAYERS,
        allowed=ALLOWED,
        hysteresis=hysteresis,
        current=None if current is None else SCHEDULES[current],
    )
    return schedule.name, num


def test_before_anything_was_seen_it_is_sequential() -> None:
    assert pick(new()) == ("sequential", 1)
    assert pick(new(), "prefill_dual") == ("sequential", 1)


@pytest.mark.promise(
    "takes the cheapest schedule for the step at hand, which for small steps is "
    "sequential with one micro-batch"
)
def test_chooses_by_regime() -> None:
    balanced = {
        "attn_in": (0, 4, 0),
        "attn_core": (0, 5, 0),
        "gate": (0, 0.5, 0),
        "shared": (0, 2, 0),
        "experts": (0, 8.5, 0),
        "dispatch": (0, 9.5, 0),
        "combine": (0, 9.5, 0),
    }
    decode = {
        "attn_in": (0, 10, 0),
        "attn_core": (0, 10, 0),
        "gate": (0, 0.5, 0),
        "shared": (0, 2, 0),
        "experts": (0, 4, 0),
        "dispatch": (0, 10, 0),
        "combine": (0, 10, 0),
    }
    assert pick(learned(balanced)) == ("prefill_dual", 2)
    assert pick(learned(decode)) == ("decode_five", 2)
    assert pick(learned(FIXED)) == ("sequential", 1)
    alone = {op: times for op, times in balanced.items() if op not in ("dispatch", "combine")}
    assert pick(learned(alone)) == ("sequential", 1)


def test_nothing_to_halve_or_nothing_allowed() -> None:
    costs = learned(LINEAR)
    one = MicroBatchWork(1, 100)
    none = choose(
        costs, WHOLE, halve_works(WHOLE), num_layers=8, allowed=[SEQUENTIAL], hysteresis=0
    )
    assert none == (SEQUENTIAL, 1)
    found = choose(costs, one, halve_works(one), num_layers=8, allowed=ALLOWED, hysteresis=0)
    assert found == (SEQUENTIAL, 1)


def test_hysteresis_keeps_what_runs() -> None:
    costs = learned(LINEAR)
    halves = halve_works(WHOLE)
    priced = {s.name: step_s(costs, s, [WHOLE] if s is SEQUENTIAL else halves, 8) for s in ALLOWED}
    ahead = priced["sequential"] / priced["prefill_dual"] - 1
    assert ahead > 0
    assert pick(costs, None, ahead * 0.9)[0] == "prefill_dual"
    assert pick(costs, None, ahead * 1.1)[0] == "sequential"
    behind = priced["decode_five"] / priced["prefill_dual"] - 1
    assert behind > 0
    assert pick(costs, "decode_five", behind * 1.1)[0] == "decode_five"
    assert pick(costs, "decode_five", behind * 0.9)[0] == "prefill_dual"


def test_it_tries_the_halves_once_and_learns() -> None:
    """Try unmeasured halves; when they prove no faster, avoid them."""
    rng = random.Random(0)
    costs = new()
    current, tried = "sequential", []
    for at in range(600):
        works = [WHOLE] if current == "sequential" else list(halve_works(WHOLE))
        costs.observe(works, step(FIXED, works, rng, 0.02))
        current, num = pick(costs, current)
        if num == 2:
            tried.append(at)
    assert len(tried) <= 3


def test_long_models_are_extrapolated() -> None:
    costs = StepCosts(61, 58)
    rng = random.Random(0)
    for n in (64, 256, 512):
        work = MicroBatchWork(n, n * 150)
        costs.observe([work], step(LINEAR, [work], rng, 0.0))
    halves = halve_works(WHOLE)
    times = [costs.op_seconds(half) for half in halves]
    dense_s = 3 * sum(t.attn_in + t.attn_core + t.shared for t in times)
    for schedule in (PREFILL_DUAL, DECODE_FIVE, SEQUENTIAL):
        exact_s = price(schedule, times, 58).total_s + dense_s
        assert step_s(costs, schedule, halves, 61) == pytest.approx(exact_s, rel=0.002)


def test_halve_works() -> None:
    assert halve_works(MicroBatchWork(7, 100)) == (MicroBatchWork(4, 50), MicroBatchWork(3, 50))


def test_what_grows_with_tokens_is_per_token_and_of_the_usual_step() -> None:
    rng, costs = random.Random(3), new()
    assert costs.growing_s("experts") == 0.0
    for _ in range(400):
        works = [MicroBatchWork(rng.choice([200, 800]), 1000)] * rng.choice([1, 2])
        costs.observe(works, step(LINEAR, works, rng, 0.01))
    # 1 us per token and layer; 500 tokens on average in one micro-batch or two: 750 tokens per step.
    assert costs.growing_s("experts") == pytest.approx(750e-6, rel=0.25)
    fixed = new()
    for _ in range(400):
        works = [MicroBatchWork(rng.choice([20, 40, 80]), 1000)]
        fixed.observe(works, step(FIXED, works, rng, 0.01))
    assert fixed.growing_s("experts") < 100e-6 < 2000e-6, "reading weights does not become less"

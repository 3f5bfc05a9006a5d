"""Units within a promise: the largest batch that keeps it; impossible promises give a reason."""

from __future__ import annotations

import dataclasses

import pytest

from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.plan.traffic import Traffic
from hadal.lab.sim.plan.units import KV_UNEVEN, DecodeUnit, PrefillUnit, Pricing, Rejected
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.slo import Slo

TRAFFIC = Traffic(kv_length=4989.0)


def pricing(hardware: str = "h800", ttft_s: float = 2.0, tpot_s: float = 0.05) -> Pricing:
    return Pricing(HARDWARE[hardware], DEEPSEEK_V3, TRAFFIC, Slo(ttft_s, tpot_s))


def decode(
    num_ranks: int, num_redundant: int, mtp_tokens: int = 0, **promise: float
) -> DecodeUnit | Rejected:
    made = pricing(**promise)  # type: ignore[arg-type]
    return made.decode(StepModel(num_ranks, made.hardware, num_redundant=num_redundant), mtp_tokens)


def test_the_batch_is_the_largest_that_keeps_the_promise() -> None:
    unit = decode(144, 32)
    assert isinstance(unit, DecodeUnit)
    assert not unit.is_memory_bound
    for batch, keeps in ((unit.batch, True), (unit.batch + 1, False)):
        price = unit.model.decode(batch, 4989.0, attention_imbalance=KV_UNEVEN)
        assert (price.seconds <= 0.05) is keeps
    assert unit.tokens_per_s == pytest.approx(144 * unit.batch / unit.tpot_s)


def test_memory_bounds_a_narrow_unit() -> None:
    unit = decode(16, 0)
    assert isinstance(unit, DecodeUnit)
    assert unit.is_memory_bound
    assert unit.tpot_s < 0.05
    assert unit.model.hbm_bytes(unit.batch * 4989.0) < 0.9 * unit.model.hardware.hbm_bytes


def test_what_does_not_fit_and_what_is_too_slow() -> None:
    small = decode(8, 0)
    assert isinstance(small, Rejected)
    assert small.why == "does not fit: weights take 101 GB of 80 GB"
    fast = decode(144, 32, tpot_s=0.005)
    assert isinstance(fast, Rejected)
    assert "TPOT" in fast.why
    assert "at batch 1" in fast.why
    assert fast.shortfall > 1.0
    late = pricing(ttft_s=0.1).prefill_sizes(StepModel(32), (8192,))[0]
    assert isinstance(late, Rejected)
    assert "TTFT" in late.why


def test_drafts_hold_more_within_the_promise() -> None:
    plain, drafts = decode(144, 32), decode(144, 32, 1)
    assert isinstance(plain, DecodeUnit)
    assert isinstance(drafts, DecodeUnit)
    assert drafts.tokens_per_s > plain.tokens_per_s


def test_prefill_takes_steps_as_long_as_the_promise_lets_them() -> None:
    model = StepModel(32)
    found = [
        pricing(ttft_s=ttft_s).prefill_sizes(model, (8192,))[0] for ttft_s in (0.6, 1.0, 2.0, 8.0)
    ]
    kept = [unit.tokens_per_s_kept for unit in found if isinstance(unit, PrefillUnit)]
    assert len(kept) == len(found)
    assert kept == sorted(kept)
    for unit, ttft_s in zip(found, (0.6, 1.0, 2.0, 8.0), strict=True):
        assert isinstance(unit, PrefillUnit)
        assert unit.ttft_s <= ttft_s * 1.001
        assert 0.0 < unit.use < 1.0


def test_a_percentile_asks_for_more_than_a_mean() -> None:
    model, mean = StepModel(32), pricing(ttft_s=4.0)
    tail = dataclasses.replace(mean, slo=Slo(4.0, 0.05, ttft_quantile=0.99))
    found = mean.prefill_sizes(model, (8192,))[0], tail.prefill_sizes(model, (8192,))[0]
    assert isinstance(found[0], PrefillUnit)
    assert isinstance(found[1], PrefillUnit)
    assert found[1].tokens_per_s_kept < found[0].tokens_per_s_kept


def test_what_a_simulation_found_slower_is_planned_with_less() -> None:
    made = pricing()
    unit = made.decode(StepModel(144), 0)
    wary = dataclasses.replace(made, decode_share=0.9).decode(StepModel(144), 0)
    assert isinstance(unit, DecodeUnit)
    assert isinstance(wary, DecodeUnit)
    assert wary.batch < unit.batch
    assert wary.tpot_s <= 0.045


def test_fp4_weighs_less_and_runs_where_it_can() -> None:
    made = pricing("gb200")
    fp4 = [unit for unit in made.decode_units(0, ("fp4",)) if isinstance(unit, DecodeUnit)]
    assert min(unit.model.num_ranks for unit in fp4) == 4, "182 GB of weights are 105 in FP4"
    assert not list(pricing("h200").decode_units(0, ("fp4",)))

"""Measured units: near the price of their steps, on a line that never falls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.config import DECODE, PREFILL
from hadal.core.errors import ConfigError
from hadal.lab.sim.day.curves import (
    NEAR,
    REQUESTS_PER_RANK,
    UnitCurves,
    batch_max,
    batch_within,
    decode_curve,
    decode_point,
    points_at,
    prefill_point,
)
from hadal.lab.sim.day.demand import DemandFigures
from hadal.lab.sim.day.study import Study
from tests.unit.lab.sim.studies import PLACED, cached_day, curves, load, model, small


@st.composite
def measured(draw: st.DrawFn) -> UnitCurves:
    """Draw a unit's curves with decode measured at two to six batches, with any TPOT of 5 to 200
    ms.
    """
    gaps = draw(st.lists(st.floats(1.0, 40.0), min_size=2, max_size=6))
    tpots_s = draw(st.lists(st.floats(0.005, 0.2), min_size=len(gaps), max_size=len(gaps)))
    at = np.cumsum(gaps) + 4.0
    return UnitCurves(
        tuple(zip(at.tolist(), tpots_s, strict=True)), 16, 1e5, 0.5, draw(st.floats(8.0, 300.0))
    )


@given(measured())
def test_more_requests_are_never_faster_and_nothing_jumps(made: UnitCurves) -> None:
    batch = np.linspace(0.0, 2 * made.decode[-1][0], 4001)
    tpot_s = made.tpot_s(batch)
    steps = np.diff(tpot_s)
    assert (tpot_s > 0).all()
    assert (steps >= -1e-12).all()
    at, measured_s = np.array(made.decode).T
    slope = np.diff(np.maximum.accumulate(measured_s)) / np.diff(at)
    # No steeper than between two measured points.
    assert steps.max() <= slope.max() * (batch[1] - batch[0]) + 1e-12


def test_it_goes_through_what_was_measured() -> None:
    made = UnitCurves(((10.0, 0.02), (30.0, 0.03), (40.0, 0.04)), 16, 1e5, 0.5, 60.0)
    asked = np.array([10.0, 20.0, 30.0, 40.0, 50.0, 0.0, -1e3])
    assert made.tpot_s(asked) == pytest.approx([0.02, 0.025, 0.03, 0.04, 0.05, 0.015, 0.01])


@given(measured(), st.floats(0.002, 0.3))
def test_what_a_unit_is_counted_on_keeps_the_promise(made: UnitCurves, promise_s: float) -> None:
    if promise_s < made.tpot_s(np.array(1.0)):
        with pytest.raises(ValueError, match="Allow a longer TPOT, or use faster hardware"):
            made.decode_tokens_per_s(promise_s)
        return
    tokens_per_s = made.decode_tokens_per_s(promise_s)
    batches = np.arange(1.0, made.batch_max + 1.0)
    kept = batches[made.tpot_s(batches) <= promise_s]
    assert tokens_per_s >= made.decode_ranks * kept[0] / float(made.tpot_s(kept[:1])[0]) * (
        1 - 1e-9
    )
    assert tokens_per_s <= made.decode_ranks * (made.batch_max + 1.0) / float(
        made.tpot_s(batches).min()
    ) * (1 + 1e-9)
    # A looser promise leaves at least the same throughput.
    assert made.decode_tokens_per_s(2 * promise_s) >= tokens_per_s


def test_prompt_tokens_are_those_computed_and_those_found() -> None:
    made = UnitCurves(((10.0, 0.02), (30.0, 0.03)), 16, 40_000.0, 0.6, 60.0)
    assert made.prefill_tokens_per_s == pytest.approx(100_000.0)
    unit = made.unit_model()
    found = (unit.prefill_tokens_per_s, unit.decode_ranks, unit.batch_max)
    assert found == (made.prefill_tokens_per_s, 16, 60.0)
    assert float(unit.tpot_s(np.array(20.0))) == pytest.approx(0.025)


def test_a_measured_unit_is_a_little_slower_than_its_price() -> None:
    """Measure a unit: uneven ranks and small micro-batches cost time, so it is never much faster."""
    figures = load().figures()
    for at, tpot_s in curves().decode:
        priced = model(DECODE).decode(at, figures.kv_length, 1, mtp_accept=small().mtp_accept)
        assert priced.tokens_per_s_user is not None
        assert 0.97 < tpot_s * priced.tokens_per_s_user < 1.35
    chunk = small().chunk_tokens
    rate = model(PREFILL).prefill(chunk, figures.tokens_in, figures.tokens_hit).tokens_per_s_gpu
    assert 0.5 < curves().prefill_computed_per_s / (8 * rate) < 1.02


def test_about_as_many_run_as_were_asked_for() -> None:
    for (at, _), wanted in zip(curves().decode, (6.0, 14.0, 24.0), strict=True):
        assert at == pytest.approx(wanted, rel=0.15)


def test_experts_that_are_not_balanced_cost_time() -> None:
    figures = load().figures()
    (_, even_s), (_, uneven_s) = (
        decode_point(small(), {**PLACED, DECODE: placed}, figures, cached_day(), 20.0)
        for placed in (1.0, 3.0)
    )
    assert uneven_s > 1.05 * even_s


def test_nothing_to_measure_is_said() -> None:
    empty = small(
        window=replace(
            small().window,
            back_s=0.0,
            settle_s=0.0,
            first_token_s=0.0,
            seconds=1e-3,
            prefill_seconds=1e-3,
        )
    )
    with pytest.raises(ConfigError, match=r"raise window\.back_s and window\.seconds"):
        decode_point(empty, PLACED, load().figures(), cached_day(), 6.0)
    with pytest.raises(ConfigError, match="prefill had no work"):
        prefill_point(empty, PLACED, load().figures(), cached_day())


def test_a_batch_fits_slots_and_memory() -> None:
    def of(study: Study, kv_length: float) -> float:
        return batch_max(study, DemandFigures((1.0,) * 24, 100.0, 0.0, 100.0, kv_length))

    assert of(small(), 500.0) == 32.0
    assert of(small(), 50_000.0) == pytest.approx(of(small(), 100_000.0) * 2, rel=0.01)
    assert of(small(), 100_000.0) < 32.0
    # KV has 80 GB less the weights: two experts per layer and the dense weights.
    assert of(replace(Study(), drafts=0), 4_989.0) == pytest.approx(135, abs=1)
    # With the draft layer: KV of one more layer, and its weights take the memory of one request.
    assert of(Study(), 4_989.0) == pytest.approx(135 * 61 / 62 - 1.2, abs=1)


@pytest.mark.parametrize("most", [1.0, 16.0, 24.0, 25.0, 60.0, 113.0, 134.9, 160.0])
def test_points_are_apart_and_within_what_can_be(most: float) -> None:
    at = np.array(points_at(most))
    assert len(at) >= 3
    assert at.max() <= most
    assert (at[1:] >= NEAR * at[:-1]).all()
    assert points_at(160.0) == REQUESTS_PER_RANK


def test_a_promise_is_kept_by_so_many_as_are_priced_at_it() -> None:
    for tpot_ms, placed in ((14.0, 1.0), (18.0, 1.0), (18.0, 1.5)):
        batch = batch_within(small(tpot_ms=tpot_ms), placed, 1_800.0)
        priced = (
            small()
            .step_model(DECODE, placed)
            .decode(batch, 1_800.0, 1, mtp_accept=small().mtp_accept)
        )
        assert priced.tokens_per_s_user == pytest.approx(1e3 / tpot_ms, rel=1e-3)
    assert batch_within(small(tpot_ms=1e6), 1.0, 1_800.0) == small().decode.max_requests
    assert batch_within(small(tpot_ms=18.0), 1.5, 1_800.0) < batch_within(
        small(tpot_ms=18.0), 1.0, 1_800.0
    )


def test_a_promise_that_no_unit_keeps_is_refused_with_what_one_can_do() -> None:
    priced = small().step_model(DECODE, 1.0).decode(1.0, 1_800.0, 1, mtp_accept=small().mtp_accept)
    assert priced.tokens_per_s_user is not None
    best_ms = 1e3 / priced.tokens_per_s_user
    said = (
        f"TPOT of 1 ms: with one request per rank, a decode unit of 16 H200 takes {best_ms:.1f} ms"
    )
    with pytest.raises(ConfigError, match=said):
        batch_within(small(tpot_ms=1.0), 1.0, 1_800.0)
    with pytest.raises(ConfigError, match="Raise tpot_ms"):
        batch_within(small(tpot_ms=0.999 * best_ms), 1.0, 1_800.0)
    assert batch_within(small(tpot_ms=1.001 * best_ms), 1.0, 1_800.0) >= 1.0


def test_a_tight_promise_is_measured_where_it_may_be_kept() -> None:
    """Measure batches that a tight promise allows: a line from larger batches alone would refuse it."""
    study, figures = small(tpot_ms=13.5), load().figures()
    usual = points_at(batch_max(study, figures))
    tight = points_at(batch_max(study, figures), batch_within(study, 1.0, figures.kv_length))
    points = {at: decode_point(study, PLACED, figures, cached_day(), at) for at in tight}
    found, wide = (
        replace(curves(), decode=decode_curve(points[at] for at in wanted))
        for wanted in (tight, usual)
    )
    assert 16 * 1.0 / 13.5e-3 * 0.9 < found.decode_tokens_per_s(13.5e-3) < 16 * 2.0 / 13.5e-3
    with pytest.raises(ValueError, match="no batch reaches"):
        wide.decode_tokens_per_s(13.5e-3)


@pytest.mark.parametrize("promised", [1.0, 5.0, 6.3, 6.5, 23.9])
@pytest.mark.parametrize("most", [32.0, 160.0])
def test_a_tight_promise_adds_points_below(most: float, promised: float) -> None:
    usual, at = points_at(most), np.array(points_at(most, promised))
    assert tuple(at[-len(usual) :]) == usual
    assert (len(at) > len(usual)) == (promised < usual[0])
    assert at[0] < promised
    assert (at[1:] >= NEAR * at[:-1]).all()


def test_points_that_are_one_are_no_curve() -> None:
    assert decode_curve([(20.0, 0.03), (10.0, 0.02), (20.1, 0.9)]) == ((10.0, 0.02), (20.0, 0.03))
    with pytest.raises(ConfigError, match=r"raise decode\.max_requests"):
        decode_curve([(10.0, 0.02), (10.1, 0.03)])

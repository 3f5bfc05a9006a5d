"""A plan in the simulator, at the peak's load from the start, compared with its promise."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from hadal.lab.sim.plan import measure as plan_measure
from hadal.lab.sim.plan.measure import (
    MEASURE_S,
    RANKS_MAX,
    REQUESTS_MAX,
    SECONDS_MAX,
    SETTLE_S,
    TTFTS_MEASURE,
    TTFTS_SETTLE,
    Latency,
    fluid_of,
    measure,
    part_of,
    requests_of,
    within_limits,
)
from hadal.lab.sim.plan.traffic import Traffic
from hadal.policy.slo import Slo
from tests.unit.lab.sim.plan.test_plan import best, priced
from tests.unit.lab.sim.plans import SMALL, small


def test_a_small_fleet_runs_whole_and_keeps_its_promise() -> None:
    plan = small().ranked()[0]
    assert part_of(plan) == (plan.prefill.num_peak, plan.decode.num_peak)
    shares: list[float] = []
    seen = measure(plan, np.random.default_rng(1), shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert seen.problem(plan) == ""
    assert seen.num_failed == 0
    load = min(1.0, *(role.num_peak / role.need_peak for role in (plan.prefill, plan.decode)))
    assert seen.decode_load == pytest.approx(load * plan.decode.need_peak / plan.decode.num_peak)
    assert seen.is_full is (min(seen.prefill_load, seen.decode_load) >= 0.95)
    assert seen.requests_per_s == pytest.approx(SMALL.requests_per_s * SMALL.peak)
    assert seen.num_requests == pytest.approx(seen.requests_per_s * seen.seconds, rel=0.2)
    assert seen.ttft_s.p50 <= seen.ttft_s.p90 <= seen.ttft_s.p99
    assert seen.promised_ttft_s == seen.ttft_s.mean
    running = seen.requests_per_s * SMALL.tokens_out * seen.tpot_s.mean
    ranks = seen.num_decode * plan.decode.num_ranks
    # Little's law, from the first second on.
    assert seen.requests_per_rank * ranks == pytest.approx(running, rel=0.2)
    assert seen.kv_length == pytest.approx(SMALL.kv_length_mean, rel=0.1)


def test_a_part_has_the_proportions_of_the_whole() -> None:
    plan = best()
    num_prefill, num_decode = part_of(plan)
    found = num_prefill / num_decode
    assert found == pytest.approx(plan.prefill.need_peak / plan.decode.need_peak, rel=0.1)
    assert num_decode * plan.decode.num_ranks * plan.decode_unit.batch < 20_000


def test_a_part_is_of_few_ranks_however_lopsided_the_whole() -> None:
    plan = best(traffic=Traffic(requests_per_s=500.0, tokens_in=20_000.0, tokens_out=1.0))
    assert plan.prefill.need_peak * plan.prefill.num_ranks > 2 * RANKS_MAX * plan.decode.need_peak
    num_prefill, num_decode = part_of(plan)
    assert num_decode == 1
    assert num_prefill * plan.prefill.num_ranks + plan.decode.num_ranks <= RANKS_MAX


@pytest.mark.promise("A simulation has at most 60,000 requests and 600 seconds.")
def test_what_is_simulated_has_an_end() -> None:
    plan = best()
    running_s = plan.traffic.tokens_out * plan.decode_unit.tpot_s
    # Four and five times the promised TTFT of 2 s.
    assert within_limits(plan, 300.0) == (300.0, 8.0, 10.0)
    patient = dataclasses.replace(plan, slo=Slo(3600.0, 0.05))
    per_s, settle_s, measure_s = within_limits(patient, 1.0)
    assert (per_s, settle_s + measure_s) == (1.0, pytest.approx(SECONDS_MAX))
    assert settle_s / measure_s == pytest.approx(TTFTS_SETTLE / TTFTS_MEASURE)
    per_s, settle_s, measure_s = within_limits(patient, 400.0)
    assert per_s == 400.0
    # Time is cut first.
    assert per_s * (settle_s + measure_s + running_s) == pytest.approx(REQUESTS_MAX)
    per_s, settle_s, measure_s = within_limits(patient, 1e6)
    assert settle_s + measure_s == pytest.approx(SETTLE_S + MEASURE_S)
    # Then the rate is cut.
    assert per_s * (settle_s + measure_s + running_s) == pytest.approx(REQUESTS_MAX)


def test_requests_that_run_are_met_in_the_middle_of_theirs() -> None:
    plan = best()
    asked = requests_of(plan, 200.0, 10.0, np.random.default_rng(2))
    running = asked.is_running
    traffic = plan.traffic
    assert running.sum() == round(200.0 * traffic.tokens_out * plan.decode_unit.tpot_s)
    context = (asked.tokens_in + asked.tokens_done)[running]
    # The mean KV length of running requests is the plan's.
    assert context.mean() == pytest.approx(traffic.kv_length_mean, rel=0.03)
    found = asked.tokens_cached[~running].sum() / asked.tokens_in[~running].sum()
    assert found == pytest.approx(0.5625, rel=0.02)
    assert (~running).sum() == pytest.approx(2000, rel=0.1)


def test_a_promise_on_a_percentile_is_measured_there_and_a_miss_is_said() -> None:
    plan = small().ranked()[0]
    slow = dataclasses.replace(plan, slo=Slo(0.05, 0.04, ttft_quantile=0.9))
    seen = measure(slow, np.random.default_rng(1))
    assert seen.promised_ttft_s == seen.ttft_s.p90
    assert "simulated TTFT" in seen.problem(slow)
    missed = dataclasses.replace(
        seen, promised_ttft_s=0.01, promised_tpot_s=0.05, ttft_s=Latency(*(0.01,) * 4)
    )
    assert missed.problem(slow) == "simulated TPOT 50.0 ms > 40 ms"
    failed = dataclasses.replace(missed, promised_tpot_s=0.01, num_failed=3)
    assert "3 requests failed" in failed.problem(slow)


def test_the_fluid_day_of_a_plan_takes_about_what_was_counted() -> None:
    plan = small().ranked()[0]
    day = fluid_of(plan, np.random.default_rng(1))
    found = day.nodes_mean * plan.hardware.gpus_per_node * 24
    assert found == pytest.approx(plan.gpu_hours, rel=0.05)
    assert day.tokens_per_s_user >= 1.0 / plan.slo.tpot_s


def test_the_fluid_day_of_a_large_fleet_is_that_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = priced(
        traffic=dataclasses.replace(SMALL, requests_per_s=100.0), hardware="h200"
    ).ranked()[0]
    whole = fluid_of(plan, np.random.default_rng(1))
    monkeypatch.setattr(
        plan_measure, "FLUID_UNITS_MAX", (plan.prefill.num_peak + plan.decode.num_peak) // 2 + 1
    )
    halves = fluid_of(plan, np.random.default_rng(1))
    # Each half is rounded up to whole units.
    more = sum(math.ceil(role.unit_nodes) for role in (plan.prefill, plan.decode))
    assert 0.98 * whole.nodes_mean <= halves.nodes_mean <= whole.nodes_mean + more
    assert halves.nodes_peak % 2 == 0
    assert halves.tokens_per_s_user == pytest.approx(whole.tokens_per_s_user, rel=0.1)

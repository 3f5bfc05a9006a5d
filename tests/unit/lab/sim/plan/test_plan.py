"""The search for plans: monotone where it must be; DeepSeek's own day against its units."""

from __future__ import annotations

import dataclasses

import pytest

from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.rent import Rent
from hadal.lab.sim.plan.day import DayRules
from hadal.lab.sim.plan.plan import DeploymentPlan, HardwarePlans, SearchOptions, price_hardware
from hadal.lab.sim.plan.traffic import Traffic
from hadal.lab.sim.plan.units import Pricing
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.slo import Slo

DAY = Traffic(kv_length=4989.0)
SLO = Slo(2.0, 0.05)


def priced(
    traffic: Traffic = DAY,
    slo: Slo = SLO,
    usd: float = 2.0,
    hardware: str = "h800",
    **choice: object,
) -> HardwarePlans:
    pricing = Pricing(HARDWARE[hardware], DEEPSEEK_V3, traffic, slo)
    return price_hardware(pricing, Rent(usd, "given", ""), SearchOptions(**choice))  # type: ignore[arg-type]


def best(**asked: object) -> DeploymentPlan:
    return priced(**asked).ranked()[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def day() -> HardwarePlans:
    return priced()


def test_deepseeks_day_costs_no_more_than_with_their_units(day: HardwarePlans) -> None:
    plans = day.ranked()
    theirs = next(
        plan
        for plan in plans
        if (plan.prefill_unit.model.num_ranks, plan.decode_unit.model.num_ranks) == (32, 144)
    )
    assert plans[0].cost_usd <= theirs.cost_usd
    # The published day took 226.75 nodes on average, with drafts and an unknown TTFT.
    assert 200 < theirs.nodes_mean < 600
    assert theirs.prefill_unit.model.num_redundant == theirs.decode_unit.model.num_redundant == 32


def test_plans_are_ranked_and_each_pair_of_widths_is_there_once(day: HardwarePlans) -> None:
    plans = day.ranked()
    costs = [plan.cost_usd for plan in plans]
    assert costs == sorted(costs)
    assert costs[0] == pytest.approx(day.cost_PD.min())
    widths = [
        (plan.prefill_unit.model.num_ranks, plan.decode_unit.model.num_ranks) for plan in plans
    ]
    assert len(set(widths)) == len(widths)
    assert day.num_tried >= len(day.prefill) * len(day.decode)


def test_a_plan_has_room_for_its_traffic(day: HardwarePlans) -> None:
    plan = day.ranked()[0]
    peak = DAY.requests_per_s * DAY.peak
    for role, tokens in ((plan.prefill, DAY.tokens_in), (plan.decode, DAY.tokens_out)):
        assert role.num_peak * role.unit_tokens_per_s * role.use >= peak * tokens * (1 - 1e-9)
        assert role.need_peak <= role.num_peak < role.need_peak + 1
        assert 1 <= role.num_least < role.num_peak
    assert plan.cost_usd == pytest.approx(2.0 * 24 * 8 * plan.nodes_mean)
    assert plan.decode.rounded_share >= 1.0


def test_a_looser_promise_never_costs_more() -> None:
    by_tpot = [best(slo=Slo(2.0, tpot_s)).cost_usd for tpot_s in (0.03, 0.05, 0.15)]
    assert by_tpot == sorted(by_tpot, reverse=True)
    by_ttft = [best(slo=Slo(ttft_s, 0.05)).cost_usd for ttft_s in (0.8, 2.0, 20.0)]
    assert by_ttft == sorted(by_ttft, reverse=True)
    assert best(slo=Slo(2.0, 0.05, ttft_quantile=0.99)).cost_usd >= best().cost_usd


def test_more_traffic_never_takes_fewer_nodes() -> None:
    plans = [
        best(traffic=dataclasses.replace(DAY, requests_per_s=rate)) for rate in (0.01, 5, 100, 9000)
    ]
    hours = [plan.gpu_hours for plan in plans]
    assert hours == sorted(hours)
    per_request = [plan.cost_usd / plan.traffic.requests_per_s for plan in plans]
    assert per_request == sorted(per_request, reverse=True), "and each costs less, or no more"


def test_a_cheaper_gpu_hour_is_never_dearer() -> None:
    costs = [best(usd=usd).cost_usd for usd in (0.5, 2.0)]
    assert costs == pytest.approx([costs[0] * factor for factor in (1, 4)])


def test_a_fleet_that_moves_drafts_and_fp4_pay() -> None:
    assert best(rules=DayRules(is_static=True)).cost_usd > best().cost_usd
    assert best(mtp_tokens=(1,)).cost_usd < best().cost_usd
    assert best(mtp_tokens=(0, 1)).cost_usd == best(mtp_tokens=(1,)).cost_usd
    assert best(hardware="gb200", dtypes=("fp4",)).cost_usd < best(hardware="gb200").cost_usd


def test_a_promise_nobody_can_keep_leaves_reasons() -> None:
    found = priced(slo=Slo(2.0, 0.004))
    assert not found.ranked()
    assert not found.decode
    assert all(one.why for one in found.rejected)
    assert any("TPOT" in one.why for one in found.rejected)

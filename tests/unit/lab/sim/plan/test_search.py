"""The search with the simulator: a plan that misses its SLO is replaced by a plan for a stricter
SLO.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.rent import Rent
from hadal.lab.sim.plan import search as plan_search
from hadal.lab.sim.plan.measure import Measured, measure
from hadal.lab.sim.plan.plan import DeploymentPlan, SearchOptions, price_hardware
from hadal.lab.sim.plan.search import NODES_MAX, Search, impossible, too_large
from hadal.lab.sim.plan.units import Pricing
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.slo import Slo
from tests.unit.lab.sim.plans import SLO, SMALL, small


def test_the_best_is_simulated_and_kept() -> None:
    search = Search([small()])
    told: list[float] = []
    search.verify(1, np.random.default_rng(1), lambda plan, share: told.append(share))
    assert [plan for plan, _ in search.verified] == search.ranked()[:1]
    assert search.is_verified(search.ranked()[0])
    assert not search.refuted
    assert told[-1] == 1.0


@pytest.mark.promise(
    "If the plan misses its SLO, the planner aims at a stricter SLO on that hardware "
    "and searches again."
)
def test_what_misses_is_refuted_and_planned_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate one plan. In place of other plans' simulations, return its result with a TPOT 25 %
    longer than they planned. The search must end with a plan that allows for that.
    """
    seen = measure(small().ranked()[0], np.random.default_rng(1))

    def slower(plan: DeploymentPlan, *_: object) -> Measured:
        return dataclasses.replace(
            seen, promised_tpot_s=1.25 * plan.decode_unit.tpot_s, promised_ttft_s=0.5
        )

    monkeypatch.setattr(plan_search, "measure", slower)
    busy = dataclasses.replace(SMALL, requests_per_s=2000.0)
    pricing = Pricing(HARDWARE["h200"], DEEPSEEK_V3, busy, SLO)
    search = Search([price_hardware(pricing, Rent(2.5, "given", ""), SearchOptions())])
    before = search.ranked()[0]
    search.verify(1, np.random.default_rng(1), lambda plan, share: None)
    after, kept = search.verified[0]
    assert len(search.refuted) == 1
    assert search.refuted[0].plan == before
    assert search.refuted[0].why.startswith("simulated TPOT")
    assert kept.problem(after) == ""
    assert after.decode_unit.tpot_s <= SLO.tpot_s / 1.25
    assert after.cost_usd > before.cost_usd


def test_it_gives_up_after_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = measure(small().ranked()[0], np.random.default_rng(1))
    monkeypatch.setattr(plan_search, "measure", lambda *_: dataclasses.replace(seen, num_failed=1))
    search = Search([small()])
    monkeypatch.setattr(plan_search, "TRIES", 2)
    search.verify(1, np.random.default_rng(1), lambda plan, share: None)
    assert len(search.refuted) == 2
    assert not search.verified


def test_nothing_keeps_it_and_why() -> None:
    pricing = Pricing(HARDWARE["h20"], DEEPSEEK_V3, SMALL, Slo(0.02, 0.001))
    found = price_hardware(pricing, Rent(1.0, "given", ""), SearchOptions())
    assert not Search([found]).ranked()
    text = impossible([found])
    assert "h20 has no prefill unit that meets the SLO" in text
    assert "h20 has no decode unit that meets the SLO" in text
    assert "TPOT" in text
    assert "at batch 1" in text


@pytest.mark.promise(
    "A traffic may have a million requests/s and a plan 10,000 nodes at the peak; more is"
    " refused, with what to change."
)
def test_a_fleet_beyond_all_fleets_is_said_with_how_many_parts_it_has() -> None:
    plan = small().ranked()[0]
    assert too_large(plan) == ""
    num = math.ceil(2.5 * NODES_MAX / plan.prefill.unit_nodes)
    huge = dataclasses.replace(plan, prefill=dataclasses.replace(plan.prefill, num_peak=num))
    assert "divide requests_per_s by 3" in too_large(huge)
    assert f"{huge.nodes_peak:,.0f} nodes" in too_large(huge)

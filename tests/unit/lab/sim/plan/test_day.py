"""Units over a day: whole ones, kept by the fleet's policy; compared with the fluid day."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.lab.sim.day.published import SHAPE
from hadal.lab.sim.day.vessels import UnitModel
from hadal.lab.sim.plan.day import STEP_S, DayRules, bundled_hours, fluid_day, needs_of
from hadal.lab.sim.plan.traffic import Traffic
from hadal.policy.demand import FLAT
from hadal.policy.scaling import RoleRules


def test_a_flat_day_needs_what_it_needs() -> None:
    needs = needs_of(np.array([3.0, 3.2, 0.01]), np.array([8, 8, 16]), DayRules().level(FLAT))
    assert needs.num_peak.tolist() == needs.num_least.tolist() == [3, 4, 1]
    assert needs.gpu_hours.tolist() == [3 * 8 * 24, 4 * 8 * 24, 16 * 24]


def test_units_are_kept_for_as_long_as_they_may_be_wanted_again() -> None:
    rules = DayRules(start_s=600.0, hold_s=1800.0)
    times = np.arange(0.0, 86_400.0, STEP_S)
    level = rules.level(SHAPE)
    for at in (0, 40, 100, 287):
        near = [at + shift for shift in range(-6, 9)]
        assert level[at] == pytest.approx(max(SHAPE.at(times[i % 288]) for i in near))
    assert DayRules(is_static=True).level(SHAPE).min() == pytest.approx(SHAPE.at(times).max())


def test_a_fleet_costs_less_than_the_peak_all_day() -> None:
    mean, ranks = np.array([20.0]), np.array([8])
    moving, static = (
        needs_of(mean, ranks, DayRules(is_static=still).level(SHAPE)) for still in (False, True)
    )
    assert moving.num_peak == static.num_peak
    assert moving.gpu_hours < 0.9 * static.gpu_hours
    assert moving.num_least < static.num_least == static.num_peak


def test_bundles_cost_what_the_scarcer_role_makes_them() -> None:
    level = DayRules().level(SHAPE)
    alone = float(
        sum(
            needs_of(np.array([mean]), np.array([ranks]), level).gpu_hours[0]
            for mean, ranks in ((12.0, 32), (5.0, 144))
        )
    )
    assert bundled_hours((12.0, 5.0), (32, 144), (3, 1), level) > alone
    assert bundled_hours((12.0, 5.0), (32, 144), (1, 1), np.ones(288)) == 12 * (32 + 144) * 24


def test_the_fluid_day_takes_the_nodes_that_were_counted() -> None:
    traffic, rules = Traffic(requests_per_s=600.0), DayRules()
    capacity = 144 * 80 / 0.05
    prefill_mean = traffic.requests_per_s * traffic.tokens_in / (400_000.0 * 0.9)
    decode_mean = traffic.requests_per_s * traffic.tokens_out / (capacity * 0.98)
    level = rules.level(traffic.shape)
    counted = needs_of(np.array([prefill_mean, decode_mean]), np.array([32, 144]), level)
    model = UnitModel(400_000.0, 144, lambda batch: 0.02 + 0.03 * batch / 80.0, 100.0)
    roles = (RoleRules(4, 0.9, 1, 60), RoleRules(18, 0.98, 1, 20))
    day = fluid_day(traffic, rules, model, *roles, capacity, np.random.default_rng(1))
    assert day.node_hours * 8 == pytest.approx(counted.gpu_hours.sum(), rel=0.04)
    assert day.wait_s_max < 5.0

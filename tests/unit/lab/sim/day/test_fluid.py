"""The day as a fluid under the real fleet policy: nothing lost, short waits, the published curve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hadal.lab.sim.day.fluid import Faults, FluidDay
from hadal.lab.sim.day.hours import Day
from hadal.lab.sim.day.published import FIRST_HOUR, HOURLY_SHARES, SHAPE, DemandCurve
from hadal.lab.sim.day.vessels import UnitModel
from hadal.policy.scaling import RoleRules, ScalingRules
from hadal.roles.fleet.fleet import Fleet

UNIT_PREFILL = 574e3
"""Tokens/s of a prefill unit with hits: 7,839 per GPU (profile-data), 43.7 % computed."""
UNIT_DECODE = 295e3
"""Tokens/s of a decode unit: 2,050 per GPU, the day's peak divided by 9 units, plus 3 %."""
MODEL = UnitModel(UNIT_PREFILL, 144, lambda batch: 0.0313 + 0.000185 * batch, 256.0)
"""Line through 128 requests per GPU at 55 ms (profile-data) and 88 at 47.6 ms (the day's mean)."""
RULES = ScalingRules(
    RoleRules(4, 0.6, 5, 50, 3, 2),
    RoleRules(18, 1.0, 1, 15, 1, 0),
    num_nodes_max=400,
    start_s=600.0,
)


def fluid(
    seed: int = 1, *, rules: ScalingRules = RULES, faults: Faults | None = None, **options: Any
) -> FluidDay:
    fleet = Fleet(
        rules,
        prefill_tokens_per_s=UNIT_PREFILL,
        decode_tokens_per_s=UNIT_DECODE,
        **({"shape": SHAPE} | options),
    )
    random = np.random.default_rng(seed)
    return FluidDay(
        fleet,
        DemandCurve(),
        MODEL,
        faults or Faults(),
        random,
        start=3600.0 * FIRST_HOUR,
        step_s=60.0,
    )


def settled(run: FluidDay, num_hours: int = 3) -> FluidDay:
    """Run the first hours, and return the day to go on from there: it begins at noon without units."""
    run.run(60 * num_hours)
    return run


@pytest.fixture(scope="module")
def day() -> Day:
    return settled(fluid(), 24).run_day()


def test_the_nodes_follow_the_published_curve(day: Day) -> None:
    assert day.nodes_mean == pytest.approx(226.75, rel=0.03)
    assert abs(day.nodes_peak - 278) <= 30
    assert day.nodes_min <= 98
    assert {(num - 8) % 2 for num in day.nodes_by_step} == {0}
    assert day.decode_nodes_mean == pytest.approx(131.25, rel=0.03)
    assert day.prefill_nodes_mean == pytest.approx(95.5, rel=0.03)
    assert 20.0 <= day.tokens_per_s_user <= 22.5
    assert day.wait_s_max < 5.0
    assert day.num_changes < 40


def test_every_token_that_came_went_through(day: Day) -> None:
    assert day.tokens_in == pytest.approx(608e9, rel=5e-3)
    assert day.tokens_out == pytest.approx(168e9, rel=5e-3)
    found = [hour.hour for hour in day.hours]
    assert found == [hour % 24 for hour in range(FIRST_HOUR, FIRST_HOUR + 24)]
    for hour in day.hours:
        assert hour.tokens_in == pytest.approx(
            608e9 * HOURLY_SHARES[hour.hour] / sum(HOURLY_SHARES), rel=0.02
        )
    assert day.node_hours == pytest.approx(24 * day.nodes_mean)


def test_a_seed_is_a_run() -> None:
    first, second, other = (fluid(seed).run(300) for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_tokens_in_are_served_or_wait() -> None:
    faults = Faults(start_fail_share=0.3, node_failures_per_s=3e-6, noise=0.1)
    run = fluid(7, faults=faults)
    for _ in range(600):
        run.step()
        engine = run.engine
        in_decode = engine.decode_queue + sum(engine.held.values())
        assert engine.num_arrived == pytest.approx(
            engine.num_finished + in_decode + engine.prefill_queue, rel=1e-9
        )
    assert engine.num_returned > 0.0


def test_faults_cost_nodes_and_nobody_is_lost() -> None:
    day = settled(
        fluid(2, faults=Faults(start_fail_share=0.2, node_failures_per_s=1e-6)), 5
    ).run_day()
    assert day.tokens_out == pytest.approx(168e9, rel=0.01)
    assert day.wait_s_max < 300.0


def test_without_a_shape_the_morning_is_learned_in_a_day() -> None:
    """Run two days: the first sees only the trend, the second grows as early as with a given shape."""
    rules = replace(RULES, start_s=1800.0)
    faults = Faults(start_s=1800.0)
    from_flat = fluid(rules=rules, faults=faults)
    fleet = Fleet(rules, prefill_tokens_per_s=UNIT_PREFILL, decode_tokens_per_s=UNIT_DECODE)
    from_flat = FluidDay(
        fleet, DemandCurve(), MODEL, faults, np.random.default_rng(1), start=3600.0 * FIRST_HOUR
    )
    settled(from_flat)
    first = from_flat.run_day()
    second = from_flat.run_day()
    assert second.tokens_per_s_user >= first.tokens_per_s_user
    slowest = [min(hour.tokens_per_s_user for hour in one.hours) for one in (first, second)]
    assert slowest[1] > slowest[0]
    assert second.wait_s_max < 5.0


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"decode": replace(RULES.decode, use=0.8)}, 1),
        ({"start_s": 3600.0}, 1),
        ({"hold_s": 4 * 3600.0}, 1),
        ({"decode": replace(RULES.decode, num_min=6)}, 1),
        ({"num_nodes_max": 218}, -1),
    ],
)
def test_it_moves_as_it_should(day: Day, change: dict[str, Any], sign: int) -> None:
    other = settled(fluid(rules=replace(RULES, **change))).run_day()
    assert sign * (other.nodes_mean - day.nodes_mean) > 1.0
    assert other.nodes_peak <= change.get("num_nodes_max", 400)

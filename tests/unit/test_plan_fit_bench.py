"""The bench that fits the planner's constants: it finds the constants of given points, and a
simulated unit is near its plan.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

from bench.plan_fit import (
    QUANTILES,
    TRAFFIC,
    UNITS,
    Point,
    fit_tail,
    fit_uneven,
    model_of,
    own_steps,
    planned_ttft_s,
    price_s,
    rate_share,
    simulate,
    steps_before,
)
from hadal.lab.sim.plan.units import TTFT_TAIL, UNEVEN_POWER, tail_of

UNIT = UNITS[3]


def point(prompts: float, step_s: float = 0.2, tail: float = TTFT_TAIL) -> Point:
    tails = tuple(tail * -math.log1p(-quantile) for quantile in QUANTILES)
    return Point(
        UNIT, prompts, prompts * TRAFFIC.tokens_new, step_s, 5.0 * step_s, tails, 1000, 1.0
    )


def test_constants_are_found_that_points_could_have_been_made_with() -> None:
    models = {UNIT: model_of(UNIT)}
    points = [point(prompts) for prompts in (0.3, 1.0, 2.5)]
    made = [
        dataclasses.replace(one, step_s=price_s(one, models[UNIT], (0.6, 1.9, UNEVEN_POWER)))
        for one in points
    ]
    found = fit_uneven(made, models)
    for one in made:
        assert price_s(one, models[UNIT], found) == pytest.approx(one.step_s, rel=0.02), (
            "one stands in for the other"
        )
    assert fit_tail([point(1.0, tail=0.7), point(2.0, tail=0.7)]) == pytest.approx(0.7)
    assert tail_of(0.99) == pytest.approx(point(1.0).tails[1])


def test_what_a_prompt_takes_beside_its_own_steps() -> None:
    assert steps_before(point(1.0)) == pytest.approx(5.0 - own_steps(point(1.0)))
    model = model_of(UNIT)
    kept = dataclasses.replace(point(1.0), ttft_s=planned_ttft_s(point(1.0), model))
    assert rate_share(kept, model) == pytest.approx(1.0, rel=0.01)
    assert rate_share(dataclasses.replace(kept, ttft_s=0.8 * kept.ttft_s), model) < 0.9
    assert planned_ttft_s(point(1.0), model, before=2.0) < planned_ttft_s(
        point(1.0), model, before=3.0
    )


def test_a_simulated_unit_is_near_what_is_planned() -> None:
    model = model_of(UNIT)
    seen = simulate(UNIT, model, 1.0, 1, num_steps=30.0, requests_min=100)
    assert seen.num_requests >= 100
    assert seen.prompts == pytest.approx(1.0, rel=0.5)
    assert seen.step_s == pytest.approx(price_s(seen, model), rel=0.4)
    assert 2.0 < steps_before(seen) < 5.0
    assert 1.0 < seen.tails[0] < seen.tails[1]
    again = simulate(UNIT, model, 1.0, 1, num_steps=30.0, requests_min=100)
    assert again == seen, "a seed is a run"

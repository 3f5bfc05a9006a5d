"""The fleet's policy: within floor and nodes, monotone, stable under noise, early in the morning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.policy.demand import FLAT, DayShape
from hadal.policy.scaling import (
    RoleRules,
    RoleView,
    ScalingRules,
    ScalingStep,
    ScalingView,
    Units,
    decide,
)

BUNDLES = ScalingRules(
    RoleRules(4, 0.6, 2, 40, 3, 2),
    RoleRules(18, 0.9, 1, 12, 1, 0),
    num_nodes_max=400,
    start_s=600.0,
)
ALONE = ScalingRules(
    RoleRules(4, 0.6, 2, 40), RoleRules(18, 0.9, 1, 12), num_nodes_max=400, start_s=600.0
)
ZERO = Units(0, 0)


def view(
    prefill: float,
    decode: float,
    levels: Units = ZERO,
    *,
    shape: DayShape = FLAT,
    now_s: float = 0.0,
    **fields: Any,
) -> ScalingView:
    """Return a view with 15 minutes of this demand, in tokens/s; a unit of either role serves 1000."""
    times_s = tuple(now_s - 60.0 * index for index in range(14, -1, -1))
    share = [float(shape.at(time_s) / shape.at(now_s)) for time_s in times_s]
    return ScalingView(
        now_s,
        RoleView(times_s, tuple(prefill * part for part in share), 1000.0, shape=shape, **fields),
        RoleView(times_s, tuple(decode * part for part in share), 1000.0, shape=shape, **fields),
        levels,
    )


def test_bundles_cover_the_role_that_asks_for_most() -> None:
    # 7000 / 900 is 7.8 decode units: 8 bundles. 20 prefill units need (20 - 2) / 3 = 6 bundles.
    decision = decide(view(20 * 600.0, 7000.0), BUNDLES)
    assert decision.units == Units(26, 8)
    assert decision.why.step is ScalingStep.GROW
    assert decision.why.role == "decode"
    decision = decide(view(29.5 * 600.0, 7000.0), BUNDLES)
    assert decision.units == Units(32, 10)
    assert decision.why.role == "prefill"
    assert BUNDLES.num_nodes(decide(view(29 * 600.0, 9 * 900.0), BUNDLES).units) == 278


def test_roles_grow_by_themselves_where_there_are_no_bundles() -> None:
    assert decide(view(20 * 600.0, 7000.0), ALONE).units == Units(20, 8)


def test_a_bound_is_of_the_role_that_the_decision_speaks_of() -> None:
    why = decide(view(0.0, 7000.0), ALONE).why  # Prefill is at its floor, but decode decides.
    assert (why.role, why.step, why.bound) == ("decode", ScalingStep.GROW, "")
    assert decide(view(0.0, 0.0), ALONE).why.bound == "floor"
    assert decide(view(0.0, 20_000.0), ALONE).why.bound == "limit"


def test_a_backlog_is_worked_off_in_time() -> None:
    assert decide(view(0.0, 1800.0), ALONE).units.decode == 2
    assert decide(view(0.0, 1800.0, backlog_tokens=540_000.0), ALONE).units.decode == 3


@given(
    st.floats(0.0, 1e5),
    st.floats(0.0, 1e5),
    st.integers(0, 50),
    st.integers(0, 20),
    st.sampled_from([BUNDLES, ALONE]),
    st.integers(26, 400),
    st.floats(0.0, 20.0),
)
def test_never_below_the_floor_or_above_what_there_is(
    prefill: float,
    decode: float,
    before_p: int,
    before_d: int,
    rules: ScalingRules,
    num_nodes: int,
    held: float,
) -> None:
    rules = replace(rules, num_nodes_max=num_nodes)
    decision = decide(view(prefill, decode, Units(before_p, before_d), need_held=held), rules)
    assert 2 <= decision.units.prefill <= 40
    assert 1 <= decision.units.decode <= 12
    assert rules.num_nodes(decision.units) <= num_nodes
    assert str(decision.why)


@given(
    st.floats(0.0, 3e4), st.floats(0.0, 1e4), st.floats(1.0, 2.0), st.sampled_from([BUNDLES, ALONE])
)
def test_more_demand_never_wants_less(
    prefill: float, decode: float, times: float, rules: ScalingRules
) -> None:
    few = decide(view(prefill, decode), rules).units
    for more in (
        view(prefill * times, decode),
        view(prefill, decode * times),
        view(prefill * times, decode * times),
    ):
        many = decide(more, rules).units
        assert many.prefill >= few.prefill
        assert many.decode >= few.decode


@given(
    st.floats(0.0, 3e4),
    st.floats(0.0, 1e4),
    st.integers(26, 390),
    st.sampled_from([BUNDLES, ALONE]),
)
def test_more_nodes_are_never_used_less(
    prefill: float, decode: float, num_nodes: int, rules: ScalingRules
) -> None:
    few = decide(view(prefill, decode), replace(rules, num_nodes_max=num_nodes)).units
    many = decide(view(prefill, decode), replace(rules, num_nodes_max=num_nodes + 10)).units
    served = [
        min(u.prefill / max(1e-9, prefill / 600), u.decode / max(1e-9, decode / 900), 1.0)
        for u in (few, many)
    ]
    assert served[1] >= served[0] - 1e-9


def test_nodes_beyond_the_last_bundle_go_to_the_role_that_is_shorter() -> None:
    """Check the published peak: 278 nodes are 9 bundles, and 2 prefill units on the other 8 nodes."""
    rules = replace(
        BUNDLES, prefill=replace(BUNDLES.prefill, num_extra=0, num_min=1), num_nodes_max=278
    )
    decision = decide(view(33 * 600.0, 10.5 * 900.0), rules)
    assert decision.units == Units(29, 9)
    assert decision.why.bound == "nodes"


@pytest.mark.promise("shrink to the highest need of the last and next hold_s, plus a margin")
def test_what_was_needed_lately_is_kept() -> None:
    before = Units(29, 9)
    kept = decide(view(0.0, 5000.0, before, need_held=8.5), BUNDLES)
    assert (kept.units, kept.why.step) == (before, ScalingStep.HOLD)
    shrunk = decide(view(0.0, 5000.0, before, need_held=7.0), BUNDLES)
    assert (shrunk.units, shrunk.why.step) == (Units(26, 8), ScalingStep.SHRINK)


@pytest.mark.promise("shrink to the highest need of the last and next hold_s, plus a margin")
def test_what_will_be_needed_soon_is_kept() -> None:
    shape = DayShape((1.0,) * 8 + (1.6,) * 16)
    at_7 = 7.5 * 3600.0  # The rise begins before the hour: the shape is smooth.
    decision = decide(view(0.0, 5 * 900.0, Units(29, 9), shape=shape, now_s=at_7), BUNDLES)
    assert decision.why.need_kept > 1.15 * decision.why.need_now


@pytest.mark.promise("grow at once to the highest need within the next start-up time")
def test_it_grows_before_the_morning() -> None:
    """Check that units start one start-up time before the need: no minute has fewer than it needs."""
    shape = DayShape((1.0,) * 7 + (2.0,) + (4.0,) * 8 + (2.0,) + (1.0,) * 7)
    rules = replace(BUNDLES, start_s=1200.0)
    levels, wanted = Units(2, 0), []
    for minute in range(24 * 60):
        now_s = 60.0 * minute
        rate = 1800.0 * float(shape.at(now_s))
        decision = decide(view(0.0, rate, levels, shape=shape, now_s=now_s), rules)
        levels = decision.levels
        wanted.append((rate / 900.0, decision.units.decode))
    late = [
        minute for minute in range(20, 24 * 60) if wanted[minute][0] > wanted[minute - 20][1] + 1e-9
    ]
    assert late == []
    flat = [
        decide(view(0.0, need * 900.0, ZERO, now_s=0.0), rules).units.decode for need, _ in wanted
    ]
    assert sum(num for _, num in wanted) < 1.15 * sum(flat)


@pytest.mark.promise("shrink to the highest need of the last and next hold_s, plus a margin")
@pytest.mark.parametrize("need", [4.0, 4.5, 4.98, 5.0, 5.02, 5.5])
def test_noise_moves_no_nodes_to_and_fro(need: float) -> None:
    """Run two days of a demand that varies by 5 %: between two sizes the fleet keeps the larger."""
    random = np.random.default_rng(round(need * 100))
    rules = replace(BUNDLES, hold_s=1800.0)
    rates = need * 900.0 * (1.0 + 0.05 * random.standard_normal(2880))
    levels, held, changes = Units(2, 0), [0.0] * 30, []
    for minute in range(15, 2880):
        times_s = tuple(60.0 * index for index in range(minute - 14, minute + 1))
        role = RoleView(
            times_s,
            tuple(rates[minute - 14 : minute + 1].tolist()),
            1000.0,
            need_held=max(held[-30:]),
        )
        idle = RoleView(times_s, (0.0,) * 15, 1000.0)
        decision = decide(ScalingView(60.0 * minute, idle, role, levels), rules)
        held.append(decision.need_decode)
        if decision.levels != levels:
            changes.append((minute, levels, decision.levels))
        levels = decision.levels
    assert len(changes) <= 1 + 2 * 4, changes
    assert levels.decode in (int(need), int(need) + 1, int(need) + 2)


def test_a_unit_of_unknown_speed_is_not_too_slow() -> None:
    role = RoleView((0.0,), (1e9,), float("inf"), backlog_tokens=1e9)
    assert decide(ScalingView(0.0, role, role, ZERO), ALONE).units == ALONE.floor


@pytest.mark.parametrize(
    ("role", "fields", "words"),
    [
        ({"num_min": 0}, {}, "num_min is 0"),
        ({"num_min": 13}, {}, "num_min is 13"),
        ({"use": 0.0}, {}, "use is 0"),
        ({"unit_nodes": 0}, {}, "unit_nodes is 0"),
        ({"num_extra": -1}, {}, "may be below 0"),
        ({"num_bundle": 0}, {}, "or 0 for both"),
        ({}, {"start_s": -1.0}, "start_s"),
        ({}, {"period_s": 0.0}, "period_s"),
        ({}, {"num_nodes_max": 20}, "takes 26 nodes, and there are 20"),
    ],
)
def test_rules_that_no_fleet_can_keep_are_refused(
    role: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        replace(BUNDLES, decode=replace(BUNDLES.decode, **role), **fields)

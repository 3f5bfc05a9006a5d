"""A study's fluid day: nodes by minute match the hours; better units need no more nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hadal.core.errors import ConfigError
from hadal.lab.sim.day.curves import UnitCurves
from hadal.lab.sim.day.fluid_day import fluid_day
from tests.unit.lab.sim.studies import curves, fluid, load, small


def faster(made: UnitCurves, factor: float) -> UnitCurves:
    return replace(
        made,
        decode=tuple((at, tpot_s / factor) for at, tpot_s in made.decode),
        prefill_computed_per_s=made.prefill_computed_per_s * factor,
    )


def test_minutes_are_what_hours_say() -> None:
    made = fluid()
    nodes = made.prefill_nodes + made.decode_nodes
    assert nodes.shape == (1440,)
    assert np.array_equal(nodes, made.day.nodes_by_step)
    assert nodes.max() == made.day.nodes_peak
    for index, hour in enumerate(made.day.hours):
        minutes = slice(60 * index, 60 * index + 60)
        assert hour.hour == (12 + index) % 24, "from noon in Beijing on"
        assert hour.prefill_nodes_mean == pytest.approx(made.prefill_nodes[minutes].mean())
        assert hour.decode_nodes_mean == pytest.approx(made.decode_nodes[minutes].mean())
    assert not (made.decode_nodes % 2).any(), "a unit of 16 has two nodes"


def test_there_are_fewer_nodes_at_night() -> None:
    """Check the night: demand is least at 05:00 in Beijing, 17 hours after noon."""
    made = fluid()
    nodes = (made.prefill_nodes + made.decode_nodes).reshape(24, 60).mean(axis=1)
    assert 14 <= int(nodes.argmin()) <= 19
    assert nodes.min() < 0.5 * nodes.max()


def test_all_that_comes_is_served() -> None:
    made, asked = fluid(), load().demand()
    assert made.day.tokens_in == pytest.approx(asked.tokens_in, rel=1e-3)
    assert made.day.tokens_out == pytest.approx(asked.tokens_out, rel=5e-3)
    assert made.day.wait_s_max < 1.0


def test_the_middle_of_an_hour_obeys_littles_law() -> None:
    """Check Little's law: requests in decode = arrivals/s x duration; demand is the fluid's."""
    made, demand, measured = fluid(), load().demand(), curves()
    for index in (2, 9, 22):
        middle = made.middles[index]
        per_s = demand.requests_per_s((12.5 + index) * 3600)
        held = middle.requests_per_rank * measured.decode_ranks * middle.units.decode
        assert held == pytest.approx(
            per_s * demand.tokens_out_request / middle.tokens_per_s_user, rel=0.05
        )
        found = middle.tokens_per_s_user
        assert found == pytest.approx(1 / measured.tpot_s(np.array(middle.requests_per_rank)))
        could = middle.units.prefill * measured.prefill_tokens_per_s
        found = middle.prefill_use
        assert found == pytest.approx(per_s * demand.tokens_in_request / could, rel=0.02)


def test_units_are_counted_on_for_what_they_do_within_the_promise() -> None:
    tight = fluid_day(small(tpot_ms=16.5), curves(), load())
    prefill, decode = fluid().capacity
    assert (prefill, decode) == (
        curves().prefill_tokens_per_s,
        curves().decode_tokens_per_s(small().tpot_ms / 1e3),
    )
    assert tight.capacity[1] < decode
    assert tight.day.decode_nodes_mean > fluid().day.decode_nodes_mean


def test_faster_units_never_take_more_node_hours() -> None:
    slow, fast = (
        fluid_day(small(), faster(curves(), factor), load()).day.node_hours for factor in (0.7, 3.0)
    )
    assert fast < fluid().day.node_hours < slow
    assert fast < 0.6 * slow


def test_a_promise_that_no_batch_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match="small: no batch reaches a TPOT of 1 ms"):
        fluid_day(small(tpot_ms=1.0), curves(), load())


def test_a_fleet_that_is_too_small_makes_people_wait() -> None:
    few = small(decode=replace(small().decode, units_max=2))
    assert fluid_day(few, curves(), load()).day.wait_s_max > 60.0


def test_nodes_that_fail_make_people_wait() -> None:
    frail = replace(small().fleet, hours_between_failures=20.0)
    made = fluid_day(small(fleet=frail), curves(), load()).day
    assert made.wait_s_max > 1.0 > fluid().day.wait_s_max

"""The fluid engine: inflow equals outflow plus content; Little's law; the emptier unit fills first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.arrays import Floats
from hadal.lab.sim.day.vessels import Engine, UnitModel

MODEL = UnitModel(1e5, 10, lambda batch: 0.02 + 0.0002 * batch, 100.0)


def engine(*, prefill: int = 1, decode: int = 1) -> Engine:
    made = Engine(MODEL, 1000.0, 500.0)
    for index in range(prefill):
        made.up(f"prefill-{index}", is_decode=False)
    for index in range(decode):
        made.up(f"decode-{index}", is_decode=True)
    return made


def conserved(made: Engine) -> None:
    """Check that no requests are lost or made, to rounding."""
    near = pytest.approx
    found = made.num_arrived + made.num_returned
    assert found == near(made.num_prefilled + made.prefill_queue, rel=1e-9, abs=1e-6)
    in_decode = made.decode_queue + sum(made.held.values())
    found = made.num_prefilled
    assert found == near(made.num_finished + made.num_returned + in_decode, rel=1e-9, abs=1e-6)
    assert min(made.prefill_queue, made.decode_queue, *made.held.values(), 0.0) >= -1e-9


def test_a_steady_flow_obeys_littles_law() -> None:
    made = engine(decode=2)
    for _ in range(200):
        made.step(1200.0, 60.0)
    before, held_s = made.num_finished, made.held_s
    made.step(1200.0, 60.0)
    # 20 requests per second, 10 per unit. A unit's batch b per rank solves b x 10 ranks =
    # 10 x 500 x (0.02 + 0.0002 b): b = 11.11.
    assert [num / 10 for num in made.held.values()] == pytest.approx([11.111, 11.111], rel=1e-3)
    assert made.num_finished - before == pytest.approx(1200.0)
    seconds = (made.held_s - held_s) / (made.num_finished - before)
    assert seconds == pytest.approx(500 * (0.02 + 0.0002 * 11.111), rel=1e-3)
    conserved(made)


def test_prefill_does_what_it_can_and_the_rest_waits() -> None:
    made = engine()
    made.step(9000.0, 60.0)
    assert made.num_prefilled == pytest.approx(6000.0)
    assert made.prefill_queue == pytest.approx(3000.0)
    conserved(made)


def test_full_units_take_no_more_than_leaves() -> None:
    made = engine(prefill=9, decode=1)
    for _ in range(50):
        made.step(30_000.0, 60.0)
    assert made.held["decode-0"] == pytest.approx(1000.0)
    assert made.decode_queue > 0.0
    before = made.num_finished
    made.step(0.0, 60.0)
    assert made.num_finished - before == pytest.approx(1000.0 * 60.0 / (500 * 0.04))
    conserved(made)


def test_a_new_unit_fills_first_and_a_closed_one_empties() -> None:
    made = engine(prefill=3, decode=1)
    for _ in range(5):
        made.step(200.0, 10.0)
    made.up("decode-1", is_decode=True)
    made.step(200.0, 10.0)
    first, second = made.held.values()
    assert 0.0 < second <= first
    for _ in range(30):
        made.step(200.0, 10.0)
    assert made.held["decode-0"] == pytest.approx(made.held["decode-1"], rel=1e-6)
    made.open("decode-0", False)
    for _ in range(30):
        made.step(200.0, 10.0)
    assert made.held["decode-0"] < 1e-3
    conserved(made)


def test_what_a_dead_unit_held_is_prefilled_again() -> None:
    made = engine(decode=2)
    for _ in range(9):
        made.step(1000.0, 60.0)
    held = made.held["decode-0"]
    assert held > 0.0
    made.down("decode-0")
    assert made.prefill_queue == pytest.approx(held)
    conserved(made)
    made.down("prefill-0")
    made.down("nobody")
    made.step(10.0, 60.0)
    assert made.prefill_queue == pytest.approx(held + 10.0)
    conserved(made)


def test_with_no_unit_everything_waits() -> None:
    made = engine(prefill=0, decode=0)
    made.step(10.0, 60.0)
    assert (made.prefill_queue, made.num_finished) == (10.0, 0.0)


def test_the_step_does_not_matter_much() -> None:
    """Change the arrival rate every 300 s: steps of 60 s give the result of steps of 1 s within 2
    %.
    """

    def run(step_s: float) -> Floats:
        made = engine(prefill=9, decode=2)
        for rate in (10.0, 20.0, 80.0, 30.0):
            for _ in range(round(300.0 / step_s)):
                made.step(rate * step_s, step_s)
        return np.array([made.num_finished, made.held_s])

    assert run(60.0) == pytest.approx(run(1.0), rel=0.02)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["up", "down", "close", "open", "back"]),
            st.integers(0, 3),
            st.floats(0.0, 3e4),
            st.floats(1.0, 300.0),
        ),
        max_size=40,
    )
)
def test_nothing_is_lost_whatever_happens(events: list[tuple[str, int, float, float]]) -> None:
    made = engine()
    for what, index, num_new, step_s in events:
        unit = f"decode-{index}"
        if what == "up" and unit not in made.decode_units:
            made.up(unit, is_decode=True)
        elif what == "down":
            made.down(unit)
        elif what == "back" and unit in made.held:
            made.give_back(unit)
        else:
            made.open(unit, what != "close")
        made.step(num_new, step_s)
        conserved(made)
        assert all(
            num <= MODEL.batch_max * MODEL.decode_ranks * (1 + 1e-6) for num in made.held.values()
        )

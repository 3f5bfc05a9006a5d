"""Free constants of the step model: at most eight, each with bounds, a source and a use."""

from dataclasses import fields, replace

import pytest

from hadal.lab.perf.constants import BOUNDS, CONSTANTS, MAX_CONSTANTS, Constants
from hadal.lab.perf.step import StepModel

NAMES = [field.name for field in fields(Constants)]


def test_there_are_at_most_eight_and_each_has_a_bound() -> None:
    assert len(NAMES) <= MAX_CONSTANTS == 8
    assert set(NAMES) == set(BOUNDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_lies_inside_physical_bounds_and_says_how_it_was_set(name: str) -> None:
    bound = BOUNDS[name]
    assert bound.low < getattr(CONSTANTS, name) < bound.high
    assert bound.unit
    assert len(bound.how) > 40


@pytest.mark.parametrize("name", NAMES)
def test_a_value_outside_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(CONSTANTS, **{name: BOUNDS[name].high * 1.01})


@pytest.mark.parametrize("name", NAMES)
def test_each_constant_moves_a_step(name: str) -> None:
    """Check that each constant changes a step's time; otherwise it would not belong to the model."""
    bound = BOUNDS[name]
    other = replace(CONSTANTS, **{name: bound.low + 0.8 * (bound.high - bound.low)})

    def seconds(constants: Constants) -> tuple[float, float]:
        decode = StepModel(128, constants=constants).decode(256, 4096, schedule="decode_five")
        return decode.seconds, StepModel(32, constants=constants).prefill(16384, 4096).seconds

    assert seconds(other) != seconds(CONSTANTS)

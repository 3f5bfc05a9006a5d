"""An hour's window: the same again from the same seed, and a process that is left as it was found."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from hadal.core.config import DECODE, PREFILL
from hadal.policy.scaling import Units
from hadal.sim.hour import HourSetting, run_hour
from hadal.sim.sessions import WorkloadParams
from hadal.sim.study import Study, WindowStudy

PLACED = {PREFILL: 1.0, DECODE: 1.0}
SMALL = Study(
    workload=replace(WorkloadParams(), sessions_per_day=40_000.0), window=WindowStudy(1.0, 0.5, 600.0)
)
SETTING = HourSetting(10, Units(1, 1), 0.05, 3.0)


def test_an_hour_is_the_same_again_and_adds_up() -> None:
    one, other = (run_hour(SMALL, PLACED, SETTING, None) for _ in range(2))
    assert one.problems == ()
    assert one.reading.decode.tokens > 0.0
    assert (one.num_events, one.num_steps) == (other.num_events, other.num_steps)
    assert np.array_equal(one.reading.ttft_s, other.reading.ttft_s)
    assert one.reading.decode.tokens == other.reading.decode.tokens


@pytest.mark.parametrize("is_on", [True, False])
def test_who_looks_for_garbage_does_so_afterwards_whatever_happened(is_on: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(KeyError):
            run_hour(SMALL, {}, SETTING, None)
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()

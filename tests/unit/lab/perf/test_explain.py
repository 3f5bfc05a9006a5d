"""Explained steps: the table adds up to the step, and the trace shows the same walk of the schedule
that was priced.
"""

from itertools import pairwise

import pytest

from hadal.lab.perf.explain import StepPrice
from hadal.lab.perf.step import StepModel
from hadal.overlap.trace import COMPUTE, LINK, WAIT, chrome_trace, duration_s, shares, timeline
from hadal.perf.price import price

STEPS = {
    "decode_five": StepModel(128).decode(128, 4096, 1, schedule="decode_five"),
    "decode sequential": StepModel(144).decode(16, 4989, schedule="sequential"),
    "decode, one rank": StepModel(1).decode(4, 1000),
    "prefill_dual": StepModel(32).prefill(16384, 4096, schedule="prefill_dual"),
    "prefill of one token": StepModel(32).prefill(1, 4096),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())


@every_step
def test_exposed_times_add_up_to_the_step(step: StepPrice) -> None:
    assert sum(stage.exposed_s for stage in step.stages) == pytest.approx(step.seconds, rel=1e-9)
    assert all(stage.exposed_s <= stage.seconds * (1 + 1e-9) for stage in step.stages)


@every_step
def test_the_makespan_of_many_layers_is_that_of_the_whole_walk(step: StepPrice) -> None:
    walked = price(step.schedule, step.ops, step.num_layers)
    for field in ("total_s", "exposed_s", "compute_s", "link_s"):
        found = getattr(step.walked, field)
        assert found == pytest.approx(getattr(walked, field), rel=1e-9, abs=1e-12)


@every_step
def test_the_trace_is_the_walk(step: StepPrice) -> None:
    traced = step.traced()
    assert duration_s(traced.events) == pytest.approx(step.walked.total_s, rel=1e-9)
    (share,) = shares(traced.events)
    assert share.compute_s == pytest.approx(step.walked.compute_s, rel=1e-9)
    assert share.link_s == pytest.approx(step.walked.link_s, rel=1e-9)
    assert share.exposed_s == pytest.approx(step.walked.exposed_s, rel=1e-9, abs=1e-12)


def test_lanes_never_run_two_things_at_once() -> None:
    events = STEPS["decode_five"].traced(6).events
    for lanes in ((COMPUTE, WAIT), (LINK,)):
        mine = sorted((event.start_s, event.end_s) for event in events if event.lane in lanes)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(mine))


def test_pictures() -> None:
    step = STEPS["decode_five"]
    picture = timeline(step.traced(8).events, 0, 5)
    assert all(letter in picture for letter in "acgsEDMw")
    spans = chrome_trace("decode", [step.traced(8)])["traceEvents"]
    assert sum(span["ph"] == "X" and span["name"] == "dispatch" for span in spans) == 16


def test_what_bounds_a_part_is_priced_too() -> None:
    """Check the bound of the output head: reading weights for a few rows, computing for many."""
    bounds = [
        {stage.name: stage.bound for stage in StepModel(144).decode(batch, 4989).stages}[
            "output head"
        ]
        for batch in (8, 1024)
    ]
    assert bounds == ["memory", "compute"]


def test_one_rank_waits_for_no_link() -> None:
    alone = STEPS["decode, one rank"]
    assert alone.walked.link_s == alone.walked.exposed_s == 0.0

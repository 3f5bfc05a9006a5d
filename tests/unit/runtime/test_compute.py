"""The computing thread: plans in order, results back, idleness told from overhead."""

import threading
import time

import pytest

from hadal.core.errors import InvariantError
from hadal.core.plans import PrefillPlan, StepDone, StepPlan
from hadal.core.seams import MAX_STEPS_IN_FLIGHT
from hadal.runtime.compute import Compute


class SlowRunner:
    """A Runner whose steps take a given time, and which raises when told to."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.raises = False

    def execute(self, plan: StepPlan) -> StepDone:
        if self.raises:
            raise RuntimeError("broken")
        time.sleep(self.step_s)
        return StepDone(plan.step_id, (), (), {}, self.step_s)

    def close(self) -> None:
        return None


class Harness:
    """A Compute and the wake-ups it gives."""

    def __init__(self, runner: SlowRunner) -> None:
        self.woken = threading.Semaphore(0)
        self.compute = Compute(runner, self.woken.release)

    def result(self) -> list[StepDone]:
        assert self.woken.acquire(timeout=5)
        return self.compute.take()


def plan(step_id: int) -> PrefillPlan:
    return PrefillPlan(step_id, ())


def test_results_come_in_the_order_of_the_plans() -> None:
    harness = Harness(SlowRunner(0.001))
    done: list[int] = []
    submitted = 0
    while len(done) < 50:
        while submitted < 50 and harness.compute.num_in_flight < MAX_STEPS_IN_FLIGHT:
            harness.compute.submit(plan(submitted), follows=False)
            submitted += 1
        done += [result.step_id for result in harness.result()]
    assert done == list(range(50))
    assert harness.compute.num_in_flight == 0
    assert harness.compute.stop(5)


def test_a_third_plan_is_a_bug_of_the_leader() -> None:
    harness = Harness(SlowRunner(0.05))
    for step_id in range(MAX_STEPS_IN_FLIGHT):
        harness.compute.submit(plan(step_id), follows=False)
    with pytest.raises(InvariantError):
        harness.compute.submit(plan(9), follows=False)
    assert harness.compute.stop(5)


def test_waiting_for_work_is_not_overhead() -> None:
    harness = Harness(SlowRunner())
    for step_id in range(5):
        time.sleep(0.02)
        harness.compute.submit(plan(step_id), follows=False)
        harness.result()
    assert harness.compute.overhead_ms == 0
    assert harness.compute.stop(5)


def test_the_time_a_following_plan_took_to_come_is_overhead() -> None:
    harness = Harness(SlowRunner())
    harness.compute.submit(plan(0), follows=False)
    harness.result()
    for step_id in range(1, 60):
        time.sleep(0.005)
        harness.compute.submit(plan(step_id), follows=True)
        harness.result()
    assert harness.compute.overhead_ms > 4.9
    assert harness.compute.stop(5)


def test_what_the_runner_raises_comes_out() -> None:
    runner = SlowRunner()
    harness = Harness(runner)
    runner.raises = True
    harness.compute.submit(plan(0), follows=False)
    with pytest.raises(RuntimeError, match="broken"):
        harness.result()
    assert harness.compute.stop(5)


def test_a_running_step_tells_how_long_it_runs() -> None:
    harness = Harness(SlowRunner(0.3))
    assert harness.compute.busy_s() == 0
    harness.compute.submit(plan(0), follows=False)
    time.sleep(0.1)
    assert 0.02 < harness.compute.busy_s() < 0.3
    assert not harness.compute.stop(0.01), "it is in the middle of a step"
    harness.result()
    assert harness.compute.busy_s() == 0
    assert harness.compute.stop(5)

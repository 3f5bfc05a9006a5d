"""The computing thread: plans in order, results back, idleness told from overhead."""

import threading
import time

import pytest

from hadal.core.errors import InvariantError
from hadal.core.plans import Formed, FormPlan, OpTime, PrefillPlan, StepDone, StepPlan
from hadal.core.seams import MAX_STEPS_IN_FLIGHT
from hadal.runtime.compute import IDLE, MAX_FORMS_IN_FLIGHT, Compute


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

    def abort(self) -> None:
        return None

    def close(self) -> None:
        return None


class Waiting:
    """A Runner whose steps wait for a peer until they are aborted, and never again after that."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.aborted = threading.Event()

    def execute(self, plan: StepPlan | FormPlan) -> StepDone | Formed:
        if isinstance(plan, FormPlan):
            self.aborted.clear()
            return Formed(plan.formation, None)
        self.started.release()
        error = "PeerLost: gone" if self.aborted.wait(5) else None
        return StepDone(plan.step_id, (), (), {}, 0.0, error, op_times=(OpTime("experts", 1, 0.0),))

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        return None


class Harness:
    """A Compute and the wake-ups it gives."""

    def __init__(self, runner: SlowRunner | Waiting) -> None:
        self.woken = threading.Semaphore(0)
        self.compute = Compute(runner, self.woken.release)

    def result(self) -> list[StepDone | Formed]:
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
        done += [result.step_id for result in harness.result() if isinstance(result, StepDone)]
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


def form(formation: int) -> FormPlan:
    return FormPlan(formation, 2, (), b"", 0)


def test_a_generation_breaks_off_the_step_that_waits_and_voids_the_next() -> None:
    runner = Waiting()
    harness = Harness(runner)
    harness.compute.submit(plan(0), follows=False)
    harness.compute.submit(plan(1), follows=False)
    assert runner.started.acquire(timeout=5)
    harness.compute.form(form(7))
    results: list[StepDone | Formed] = []
    while len(results) < 3:
        results += harness.result()
    first, second, formed = results
    assert isinstance(first, StepDone)
    assert first.error == "PeerLost: gone"
    assert isinstance(second, StepDone)
    assert second.error == "formation 0 is over"
    assert formed == Formed(7, None)
    assert harness.compute.num_in_flight == 0
    harness.compute.submit(plan(2), follows=False)  # Of the new generation: it runs.
    assert runner.started.acquire(timeout=5)
    runner.abort()
    assert harness.compute.stop(5)


def test_an_older_generation_that_was_not_begun_is_never_formed() -> None:
    runner = Waiting()
    harness = Harness(runner)
    harness.compute.submit(plan(0), follows=False)
    assert runner.started.acquire(timeout=5)
    for formation in (1, 2, 3):
        harness.compute.form(form(formation))
    results: list[StepDone | Formed] = []
    while len(results) < 4:
        results += harness.result()
    errors = [result.error for result in results if isinstance(result, Formed)]
    assert [error is None for error in errors[-1:]] == [True]
    assert {error for error in errors if error} <= {"formation 1 is over", "formation 2 is over"}
    assert harness.compute.stop(5)


def test_too_many_generations_at_once_are_a_bug() -> None:
    runner = SlowRunner(0.2)
    harness = Harness(runner)
    harness.compute.submit(plan(0), follows=False)
    for formation in range(MAX_FORMS_IN_FLIGHT):
        harness.compute.form(form(formation + 1))
    with pytest.raises(InvariantError, match="being formed"):
        harness.compute.form(form(99))
    assert harness.compute.stop(5)


def test_a_rank_tells_how_long_it_stood_idle() -> None:
    runner = Waiting()
    harness = Harness(runner)
    runner.aborted.set()
    harness.compute.submit(plan(0), follows=False)
    (done,) = harness.result()
    assert isinstance(done, StepDone)
    assert [op_time.op for op_time in done.op_times] == ["experts", IDLE]
    assert harness.compute.stop(5)

"""Test the computing thread: plans in order, results back, idle time kept apart from overhead."""

import threading

import pytest

from hadal.core.errors import InvariantError
from hadal.core.plans import Formed, FormPlan, OpTime, PrefillPlan, StepDone, StepPlan
from hadal.core.seams import MAX_STEPS_IN_FLIGHT
from hadal.runtime.compute import IDLE, MAX_FORMS_IN_FLIGHT, Compute
from tests.waiting import DEADLINE_S, wait_until


class QuickRunner:
    """Runner with steps that end once the test allows it; a step raises if the test says so."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.raises = False

    def execute(self, plan: StepPlan) -> StepDone:
        if self.raises:
            raise RuntimeError("broken")
        assert self.may_go_on.wait(DEADLINE_S)
        return StepDone(plan.step_id, (), (), {}, 0.0)

    def abort(self) -> None:
        return None

    def close(self) -> None:
        return None


class Waiting:
    """Runner with steps that wait for a peer until they are aborted, and never wait again."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.aborted = threading.Event()

    def execute(self, plan: StepPlan | FormPlan) -> StepDone | Formed:
        if isinstance(plan, FormPlan):
            self.aborted.clear()
            return Formed(plan.formation, None)
        self.started.release()
        error = "PeerLost: gone" if self.aborted.wait(DEADLINE_S) else None
        return StepDone(plan.step_id, (), (), {}, 0.0, error, op_times=(OpTime("experts", 1, 0.0),))

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        return None


class Clock:
    """Clock for Compute, in place of `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("hadal.runtime.compute.time", made)
    return made


class Harness:
    """Compute, which is stopped at the end of a `with` block, and its wake-ups."""

    def __init__(self, runner: QuickRunner | Waiting) -> None:
        self.woken = threading.Semaphore(0)
        self.compute = Compute(runner, self.woken.release)

    def result(self) -> list[StepDone | Formed]:
        assert self.woken.acquire(timeout=DEADLINE_S)
        return self.compute.take()


def plan(step_id: int) -> PrefillPlan:
    return PrefillPlan(step_id, ())


def test_results_come_in_the_order_of_the_plans() -> None:
    harness = Harness(QuickRunner())
    done: list[int] = []
    submitted = 0
    while len(done) < 50:
        while submitted < 50 and harness.compute.num_in_flight < MAX_STEPS_IN_FLIGHT:
            harness.compute.submit(plan(submitted), follows=False)
            submitted += 1
        done += [result.step_id for result in harness.result() if isinstance(result, StepDone)]
    assert done == list(range(50))
    assert harness.compute.num_in_flight == 0
    assert harness.compute.stop(DEADLINE_S)


def test_a_third_plan_is_a_bug_of_the_leader() -> None:
    harness = Harness(QuickRunner())
    for step_id in range(MAX_STEPS_IN_FLIGHT):
        harness.compute.submit(plan(step_id), follows=False)
    with pytest.raises(InvariantError):
        harness.compute.submit(plan(9), follows=False)
    assert harness.compute.stop(DEADLINE_S)


def test_waiting_for_work_is_not_overhead(clock: Clock) -> None:
    harness = Harness(QuickRunner())
    for step_id in range(5):
        clock.now_s += 0.02
        harness.compute.submit(plan(step_id), follows=False)
        harness.result()
    assert harness.compute.overhead_ms == 0
    assert harness.compute.stop(DEADLINE_S)


def test_the_time_a_following_plan_took_to_come_is_overhead(clock: Clock) -> None:
    harness = Harness(QuickRunner())
    harness.compute.submit(plan(0), follows=False)
    harness.result()
    for step_id in range(1, 60):
        clock.now_s += 0.005
        harness.compute.submit(plan(step_id), follows=True)
        harness.result()
    assert harness.compute.overhead_ms == pytest.approx(5.0, rel=0.01)
    assert harness.compute.stop(DEADLINE_S)


def test_what_the_runner_raises_comes_out() -> None:
    runner = QuickRunner()
    harness = Harness(runner)
    runner.raises = True
    harness.compute.submit(plan(0), follows=False)
    with pytest.raises(RuntimeError, match="broken"):
        harness.result()
    assert harness.compute.stop(DEADLINE_S)


def test_a_running_step_tells_how_long_it_runs(clock: Clock) -> None:
    runner = QuickRunner()
    harness = Harness(runner)
    runner.may_go_on.clear()
    assert harness.compute.busy_s() == 0
    harness.compute.submit(plan(0), follows=False)

    def is_busy() -> bool:
        clock.now_s += 0.1
        return harness.compute.busy_s() > 0

    wait_until(is_busy, "the step runs")
    was_s = harness.compute.busy_s()
    clock.now_s += 0.1
    assert harness.compute.busy_s() == pytest.approx(was_s + 0.1)
    assert not harness.compute.stop(0.01), "it is in the middle of a step"
    runner.may_go_on.set()
    harness.result()
    assert harness.compute.busy_s() == 0
    assert harness.compute.stop(DEADLINE_S)


def form(formation: int) -> FormPlan:
    return FormPlan(formation, 2, (), b"", 0)


def test_a_generation_breaks_off_the_step_that_waits_and_voids_the_next() -> None:
    runner = Waiting()
    harness = Harness(runner)
    harness.compute.submit(plan(0), follows=False)
    harness.compute.submit(plan(1), follows=False)
    assert runner.started.acquire(timeout=DEADLINE_S)
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
    harness.compute.submit(plan(2), follows=False)  # Runs, as it is of the new formation.
    assert runner.started.acquire(timeout=DEADLINE_S)
    runner.abort()
    assert harness.compute.stop(DEADLINE_S)


def test_an_older_generation_that_was_not_begun_is_never_formed() -> None:
    runner = Waiting()
    harness = Harness(runner)
    harness.compute.submit(plan(0), follows=False)
    assert runner.started.acquire(timeout=DEADLINE_S)
    for formation in (1, 2, 3):
        harness.compute.form(form(formation))
    results: list[StepDone | Formed] = []
    while len(results) < 4:
        results += harness.result()
    errors = [result.error for result in results if isinstance(result, Formed)]
    assert [error is None for error in errors[-1:]] == [True]
    assert {error for error in errors if error} <= {"formation 1 is over", "formation 2 is over"}
    assert harness.compute.stop(DEADLINE_S)


def test_too_many_generations_at_once_are_a_bug() -> None:
    runner = QuickRunner()
    harness = Harness(runner)
    harness.compute.submit(plan(0), follows=False)
    for formation in range(MAX_FORMS_IN_FLIGHT):
        harness.compute.form(form(formation + 1))
    with pytest.raises(InvariantError, match="being formed"):
        harness.compute.form(form(99))
    assert harness.compute.stop(DEADLINE_S)


def test_a_rank_tells_how_long_it_stood_idle() -> None:
    runner = Waiting()
    harness = Harness(runner)
    runner.aborted.set()
    harness.compute.submit(plan(0), follows=False)
    (done,) = harness.result()
    assert isinstance(done, StepDone)
    assert [op_time.op for op_time in done.op_times] == ["experts", IDLE]
    assert harness.compute.stop(DEADLINE_S)

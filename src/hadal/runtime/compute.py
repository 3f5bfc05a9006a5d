"""Computing thread of a unit: takes plans and returns results, in order. Measures its idle time, in
which it lacked a plan.

While it computes, the host's thread receives messages, plans the next step and sends tokens. Does
not depend on roles.

    plan 1 |#### step 1 ####|      |#### step 2 ####|#### step 3 ####|
                             ^ idle ^ counts only if step 2 follows step 1 (see `submit`)

A FormPlan voids the plans queued before it: steps of the old formation are answered with an error
and never run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from hadal.core.errors import InvariantError
from hadal.core.plans import Formed, FormPlan, OpTime, StepDone, StepPlan
from hadal.core.seams import MAX_STEPS_IN_FLIGHT, Runner
from hadal.runtime.worker import Worker

MAX_FORMS_IN_FLIGHT = 16
"""Maximum number of FormPlans in flight. A unit forms again when a rank is lost during forming; a
leader that asks for more than this is broken.
"""
FOLLOWS_S = 0.05
"""Step plans of ranks do not state if they follow the last step. A plan that arrives within this
time of that step's end counts as following.
"""
IDLE = "idle"
"""Name under which op times list the idle time before a step (planning and messages)."""
_SMOOTHING = 0.1


class Compute:
    """Runner of plans, one at a time, in its own thread. The host's thread calls all methods."""

    def __init__(
        self, runner: Runner, wake: Callable[[], None], begin: Callable[[], None] = lambda: None
    ) -> None:
        """`wake` is called, from the computing thread, whenever a result is ready. `begin` is
        called once in that thread, before the first plan.
        """
        self.overhead_ms = 0.0
        """Smoothed idle time of the runner between consecutive steps, in ms."""
        self._runner = runner
        self._num_in_flight = 0
        self._num_forms = 0
        self._formation = 0
        """Number of the newest queued FormPlan; plans queued before it are void."""
        self._running_formation: int | None = None
        """Formation of the running plan; None if none runs."""
        self._busy_since_s: float | None = None
        self._ended_s = time.monotonic()
        """End time of the last plan."""
        self._worker: Worker[tuple[StepPlan | FormPlan, bool, int], StepDone | Formed] = Worker(
            "compute", self._run, wake, begin=begin
        )
        self._worker.start()

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def submit(self, plan: StepPlan, *, follows: bool) -> None:
        """Queue a plan. `follows`: it follows a finished step, and the time since is overhead."""
        if self._num_in_flight >= MAX_STEPS_IN_FLIGHT:
            raise InvariantError(
                f"step {plan.step_id}: {MAX_STEPS_IN_FLIGHT} plans are in flight already"
            )
        is_soon = self._formation > 0 and time.monotonic() - self._ended_s < FOLLOWS_S
        follows = follows or self._num_in_flight > 0 or is_soon
        self._num_in_flight += 1
        self._worker.submit((plan, follows, self._formation))

    def form(self, plan: FormPlan) -> None:
        """Abort the running plan, void queued ones, and queue a formation. Needs `runner.abort`."""
        if self._num_forms >= MAX_FORMS_IN_FLIGHT:
            raise InvariantError(
                f"formation {plan.formation}: {MAX_FORMS_IN_FLIGHT} formations are being formed"
            )
        self._num_forms += 1
        self._formation = plan.formation
        self._runner.abort()
        self._worker.submit((plan, False, plan.formation))

    def abort_void(self) -> None:
        """Abort a running plan that is void: it began at the moment a FormPlan was queued."""
        running = self._running_formation
        if running is not None and running < self._formation:
            self._runner.abort()

    def take(self) -> list[StepDone | Formed]:
        """Return the finished results. Raises the runner's exception, if there was one."""
        done = self._worker.take()
        for result in done:
            if isinstance(result, Formed):
                self._num_forms -= 1
            else:
                self._num_in_flight -= 1
        return done

    def busy_s(self) -> float:
        """Return for how many seconds the current plan has run; 0 if none runs."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def stop(self, timeout_s: float) -> bool:
        """Let the running step finish and end the thread. False if `timeout_s` is too short."""
        return self._worker.stop(timeout_s)

    def _run(self, item: tuple[StepPlan | FormPlan, bool, int]) -> StepDone | Formed:
        plan, follows, formation = item
        started_s = time.monotonic()
        idle_s = started_s - self._ended_s if follows else 0.0
        if follows:
            self.overhead_ms += _SMOOTHING * (1000.0 * idle_s - self.overhead_ms)
        self._busy_since_s = started_s
        self._running_formation = formation
        try:
            # A runner reports errors in its result; if it raises, it is broken, and the host ends.
            return self._execute(plan, formation, idle_s)
        finally:
            self._ended_s = time.monotonic()
            self._busy_since_s = self._running_formation = None

    def _execute(
        self, plan: StepPlan | FormPlan, formation: int, idle_s: float
    ) -> StepDone | Formed:
        if formation < self._formation:
            void = f"formation {formation} is over"
            if isinstance(plan, FormPlan):
                return Formed(formation, void)
            return StepDone(plan.step_id, (), (), {}, 0.0, void)
        result = self._runner.execute(plan)
        if isinstance(result, StepDone) and result.op_times:
            return msgspec.structs.replace(
                result, op_times=(*result.op_times, OpTime(IDLE, 1, idle_s))
            )
        return result

"""The thread a unit computes in: plans in, results out, in order; it knows how long it stood idle for want of a plan.

While it computes, the host's thread receives messages, plans the next step and sends tokens. Knows no roles.

    plan 1 |#### step 1 ####|      |#### step 2 ####|#### step 3 ####|
                             ^ idle ^ counts only if step 2 was asked for because of, or before the end of, step 1
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from hadal.core.errors import InvariantError
from hadal.core.plans import Formed, StepDone, StepPlan
from hadal.core.seams import MAX_STEPS_IN_FLIGHT, Runner

_SMOOTHING = 0.1
_WAIT_S = 1.0


class Compute:
    """Runs plans one at a time in a thread of its own. All methods are called from the host's thread."""

    def __init__(self, runner: Runner, wake: Callable[[], None]) -> None:
        """`wake` is called, from the computing thread, whenever a result is ready to be taken."""
        self.overhead_ms = 0.0
        """Smoothed time per step that the runner stood idle though work was there."""
        self._runner = runner
        self._wake = wake
        self._plans: queue.SimpleQueue[tuple[StepPlan, bool] | None] = queue.SimpleQueue()
        self._results: deque[StepDone | Formed | BaseException] = deque()
        self._num_in_flight = 0
        self._busy_since_s: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def submit(self, plan: StepPlan, *, follows: bool) -> None:
        """Queue a plan. `follows`: it answers a finished step, so the time since that step's end is overhead."""
        if self._num_in_flight >= MAX_STEPS_IN_FLIGHT:
            raise InvariantError(f"step {plan.step_id}: {MAX_STEPS_IN_FLIGHT} plans are in flight already")
        follows = follows or self._num_in_flight > 0
        self._num_in_flight += 1
        self._plans.put((plan, follows))

    def take(self) -> list[StepDone | Formed]:
        """Return the results that are ready. Raises what the runner raised, if it did."""
        done: list[StepDone | Formed] = []
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            self._num_in_flight -= 1
            done.append(result)
        return done

    def busy_s(self) -> float:
        """How long the running step has been running; 0 if none is."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def stop(self, timeout_s: float) -> bool:
        """Let the running step finish and end the thread. False if it has not within `timeout_s`."""
        self._stopping = True
        self._plans.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        ended_s = time.monotonic()
        while not self._stopping:
            try:
                item = self._plans.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            if item is None:
                break
            plan, follows = item
            started_s = time.monotonic()
            if follows:
                idle_ms = 1000.0 * (started_s - ended_s)
                self.overhead_ms += _SMOOTHING * (idle_ms - self.overhead_ms)
            self._busy_since_s = started_s
            try:
                result: StepDone | Formed | BaseException = self._runner.execute(plan)
            except BaseException as error:
                result = error  # A runner answers with its errors; one that raises is broken, and the host ends.
            ended_s = time.monotonic()
            self._busy_since_s = None
            self._results.append(result)
            self._wake()

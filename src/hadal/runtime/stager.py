"""The thread that gets layers ready for a flip: StagePlans in, Staged out, in order, beside the
steps that run.

    host thread     submit(plan) ........................ take() -> Staged
    stage thread              fetch rest fetch rest ... |

It is slow on purpose (runtime/background): nobody waits for a better placement, everybody waits for
a late step. Knows neither weights nor placements; the store (model/experts) builds the layer, this
hands it a way to fetch experts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from hadal.core.plans import Source, Staged, StagePlan
from hadal.model.experts import Fetch, Overtaken
from hadal.runtime.background import Pace, lower_priority

MAX_WAITING = 8
"""A leader installs one layer at a time, so this many wait only if it gave the ones before up."""
_WAIT_S = 1.0

Stage = Callable[[StagePlan, Fetch, Callable[[], None]], Staged]
"""(plan, fetch, rest) -> what came of it; see model/experts.ExpertStore.stage."""


class Wire(Protocol):
    """What a stager needs of runtime/expert_wire."""

    def fetch(
        self, layer: int, source: Source, gate_up: Tensor, down: Tensor, rest: Callable[[], None]
    ) -> bool: ...

    def close(self, timeout_s: float) -> bool: ...


class Stager:
    """Runs StagePlans one at a time. All methods are called from the host's thread.

    Every plan is answered, except those that a newer generation voids.
    """

    def __init__(self, stage: Stage, wire: Wire, wake: Callable[[], None]) -> None:
        """`wire` is the stager's from now on. `wake` is called, from the thread, when there is
        something to take.
        """
        self._stage = stage
        self._wire = wire
        self._wake = wake
        self._changed = threading.Condition()
        """Guards what is below."""
        self._waiting: deque[StagePlan] = deque()
        self._generation = 0
        """Of the newest plan, or the newest FormPlan: what belongs to an older one is void."""
        self._stopping = False
        self._results: deque[Staged | BaseException] = deque()
        self._pace = Pace()
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def submit(self, plan: StagePlan) -> None:
        """Queue a plan; its outcome is among `take`'s. One that waits for the same layer is
        replaced by it.
        """
        self.void(plan.generation)
        with self._changed:
            if plan.generation < self._generation:
                return
            for old in [waiting for waiting in self._waiting if waiting.layer == plan.layer]:
                self._waiting.remove(old)
                self._refuse(old, f"stage {plan.stage_id} takes its place")
            if len(self._waiting) >= MAX_WAITING:
                self._refuse(plan, f"{MAX_WAITING} layers wait already")
            else:
                self._waiting.append(plan)
                self._changed.notify_all()

    def void(self, generation: int) -> None:
        """This generation begins: drop what waits for older ones, and break off what is being
        staged for one.
        """
        with self._changed:
            if generation > self._generation:
                self._generation = generation
                self._waiting.clear()
                self._changed.notify_all()

    def take(self) -> list[Staged]:
        """Return the outcomes that are ready. Raises what broke the thread, if anything did."""
        done = []
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    def stop(self, timeout_s: float) -> bool:
        """Break off what is being staged, end the thread and close the wire. False: not within
        `timeout_s` each.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return self._wire.close(timeout_s) and not self._thread.is_alive()

    def _refuse(self, plan: StagePlan, error: str) -> None:
        self._results.append(Staged(plan.generation, plan.stage_id, plan.layer, error))
        self._wake()

    def _run(self) -> None:
        lower_priority()
        while (plan := self._next()) is not None:
            result: Staged | BaseException
            try:
                result = self._stage(plan, *self._means(plan))
            except BaseException as error:
                # A store answers with its errors; one that raises is broken, and the host ends.
                result = error
            if not self._is_void(plan):
                self._results.append(result)
                self._wake()

    def _next(self) -> StagePlan | None:
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait(_WAIT_S)
            return None if self._stopping else self._waiting.popleft()

    def _is_void(self, plan: StagePlan) -> bool:
        return self._stopping or plan.generation < self._generation

    def _means(self, plan: StagePlan) -> tuple[Fetch, Callable[[], None]]:
        def rest() -> None:
            owed_s = self._pace.owed_s()
            if owed_s:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_void(plan), owed_s)
            if self._is_void(plan):
                raise Overtaken(f"stage {plan.stage_id} of generation {plan.generation}")

        def fetch(layer: int, source: Source, gate_up: Tensor, down: Tensor) -> bool:
            return self._wire.fetch(layer, source, gate_up, down, rest)

        return fetch, rest

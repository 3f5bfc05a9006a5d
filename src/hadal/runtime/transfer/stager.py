"""Thread that prepares layers for a flip (a change of the placement), in parallel to the steps:
StagePlans in, Staged out, in order.

    host thread     submit(plan) ........................ take() -> Staged
    stage thread              fetch rest fetch rest ... |

The thread is slow on purpose (runtime/worker): a better placement is not urgent, while a late step
delays the whole unit. Independent of weights and placements: the store (model/experts) builds the
layer, and gets a function that fetches experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hadal.core.plans import Source, Staged, StagePlan
from hadal.model.experts import Fetch, Overtaken
from hadal.runtime.transfer.experts import Weights
from hadal.runtime.worker import Pace, Worker

MAX_WAITING = 8
"""Maximum number of queued plans. A leader awaits one at a time; the others are plans given up."""

Stage = Callable[[StagePlan, Fetch, Callable[[], None]], Staged]
"""(plan, fetch, rest) -> its outcome: model/experts.ExpertStore.stage."""


class WeightTransfer(Protocol):
    """The part of ExpertTransfer that a stager uses."""

    def fetch(
        self, layer: int, source: Source, into: Weights, rest: Callable[[], None]
    ) -> bool: ...

    def close(self, timeout_s: float) -> bool: ...


class Stager:
    """Runner of StagePlans, one at a time. All methods are called from the host's thread.

    Every plan is answered, except for plans that a newer formation voids.
    """

    def __init__(self, stage: Stage, transfer: WeightTransfer, wake: Callable[[], None]) -> None:
        """Take over `transfer`. `wake` is called, from any thread, when `take` has a result."""
        self._stage = stage
        self._transfer = transfer
        self._wake = wake
        self._formation = 0
        """Newest formation of any plan or FormPlan: plans and outcomes of older ones are void."""
        self._pace = Pace()
        self._worker = Worker("stage", self._run, wake, in_background=True)
        self._worker.start()

    def submit(self, plan: StagePlan) -> None:
        """Queue a plan, in place of a queued plan of its layer; `take` returns the outcomes."""
        self.void(plan.formation)
        worker = self._worker
        with worker.changed:
            if plan.formation < self._formation:
                return
            for old in [waiting for waiting in worker.waiting if waiting.layer == plan.layer]:
                worker.waiting.remove(old)
                self._refuse(old, f"it was superseded by stage {plan.stage_id}")
            if len(worker.waiting) >= MAX_WAITING:
                self._refuse(plan, f"{MAX_WAITING} layers are queued already")
            else:
                worker.submit(plan)

    def void(self, formation: int) -> None:
        """Begin a formation: drop queued plans of older formations; break off a running plan."""
        with self._worker.changed:
            if formation > self._formation:
                self._formation = formation
                self._worker.waiting.clear()
                self._worker.changed.notify_all()

    def take(self) -> list[Staged]:
        """Return the outcomes that are ready. Raises the exception of the thread, if any."""
        return self._worker.take()

    def stop(self, timeout_s: float) -> bool:
        """Break off the running plan, end the thread and close the transfer. Return False if either
        took longer than `timeout_s`.
        """
        is_ended = self._worker.stop(timeout_s)
        return self._transfer.close(timeout_s) and is_ended

    def _refuse(self, plan: StagePlan, error: str) -> None:
        self._worker.put(Staged(plan.formation, plan.stage_id, plan.layer, error))
        self._wake()

    def _run(self, plan: StagePlan) -> Staged | None:
        # A store answers with its errors; one that raises is broken, and the host ends.
        staged = self._stage(plan, *self._fetch_and_rest(plan))
        return None if self._is_void(plan) else staged

    def _is_void(self, plan: StagePlan) -> bool:
        return self._worker.is_stopping or plan.formation < self._formation

    def _fetch_and_rest(self, plan: StagePlan) -> tuple[Fetch, Callable[[], None]]:
        def rest() -> None:
            owed_s = self._pace.owed_s()
            if owed_s:
                with self._worker.changed:
                    self._worker.changed.wait_for(lambda: self._is_void(plan), owed_s)
            if self._is_void(plan):
                raise Overtaken(f"stage {plan.stage_id} of formation {plan.formation}")

        def fetch(layer: int, source: Source, into: Weights) -> bool:
            return self._transfer.fetch(layer, source, into, rest)

        return fetch, rest

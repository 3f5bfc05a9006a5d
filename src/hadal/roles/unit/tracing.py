"""Recording of a unit's next steps on request, and the answer once they are done.

Looks at no event itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hadal.core.messages.questions import Trace, TracedStep, TraceRequest
from hadal.core.plans import StepDone
from hadal.core.seams import Effect, Send

STEPS_MAX = 256
"""Most steps of one trace; more are not recorded, so that the answer stays a message."""
REQUESTS_MAX = 8
"""Traces asked for and not answered; one more is answered with no steps at once."""


@dataclass(slots=True)
class _Asked:
    reply_id: int
    num_steps: int
    until_s: float
    """Until then somebody waits for it."""
    num_planned: int = 0
    steps: list[TracedStep] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    schedule: str
    num_micro_batches: int
    num_tokens: int
    balance: dict[str, float]


class Tracer:
    """Requests are served one after another, each step for the oldest one that misses some."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._asked: deque[_Asked] = deque()
        self._in_flight: dict[int, PlannedStep] = {}

    def ask(self, now_s: float, request: TraceRequest) -> list[Effect]:
        """Record the next steps; a trace of nothing is answered at once. A unit without work keeps no
        place for those who gave up.
        """
        waiting = (asked for asked in self._asked if asked.num_planned or now_s < asked.until_s)
        self._asked = deque(waiting)
        if request.num_steps < 1 or len(self._asked) >= REQUESTS_MAX:
            return [Send("front", Trace(self._unit, request.reply_id, ()))]
        self._asked.append(
            _Asked(request.reply_id, min(request.num_steps, STEPS_MAX), now_s + request.wait_s)
        )
        return []

    @property
    def is_wanted(self) -> bool:
        """The next plan is to be recorded."""
        return any(asked.num_planned < asked.num_steps for asked in self._asked)

    def planned(
        self,
        step_id: int,
        schedule: str,
        num_micro_batches: int,
        num_tokens: int,
        balance: dict[str, float] | None = None,
    ) -> None:
        """A plan that is recorded was made. `balance`: of its ranks, by objective
        (core/balance).
        """
        asked = next(asked for asked in self._asked if asked.num_planned < asked.num_steps)
        asked.num_planned += 1
        self._in_flight[step_id] = PlannedStep(
            schedule, num_micro_batches, num_tokens, balance or {}
        )

    def done(self, done: StepDone) -> list[Effect]:
        """A step is done; steps are done in the order of their plans."""
        if not self._in_flight or (planned := self._in_flight.pop(done.step_id, None)) is None:
            return []
        asked = self._asked[0]
        asked.steps.append(
            TracedStep(
                done.step_id,
                planned.schedule,
                planned.num_micro_batches,
                planned.num_tokens,
                done.events,
                planned.balance,
                done.link_bytes,
            )
        )
        if len(asked.steps) < asked.num_steps:
            return []
        self._asked.popleft()
        return [Send("front", Trace(self._unit, asked.reply_id, tuple(asked.steps)))]

    def forget(self) -> None:
        """Whoever asked is gone: another front counts its requests from 1 as well."""
        self._asked.clear()
        self._in_flight.clear()

    def reset(self) -> None:
        """Steps in flight will not be done: others are recorded instead."""
        self._in_flight.clear()
        for asked in self._asked:
            asked.num_planned = len(asked.steps)

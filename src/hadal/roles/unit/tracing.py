"""Recording of a unit's next steps on request, and the answer once they are done.

Receives no events itself; the leader calls it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hadal.core.messages.questions import Trace, TracedStep, TraceRequest
from hadal.core.plans import StepDone
from hadal.core.seams import Effect, Send

STEPS_MAX = 256
"""Maximum number of steps of one trace, so that the answer fits into a message."""
REQUESTS_MAX = 8
"""Maximum number of unanswered requests for traces; one more is answered with no steps at once."""


@dataclass(slots=True)
class _Asked:
    reply_id: int
    num_steps: int
    until_s: float
    """Time until which the sender waits for the trace."""
    num_planned: int = 0
    steps: list[TracedStep] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    schedule: str
    num_micro_batches: int
    num_tokens: int
    balance: dict[str, float]


class Tracer:
    """Requests for traces, served one after another: each step goes to the oldest that needs more."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._asked: deque[_Asked] = deque()
        self._in_flight: dict[int, PlannedStep] = {}

    def ask(self, now_s: float, request: TraceRequest) -> list[Effect]:
        """Record the next steps; answer at once if none are wanted, or too many requests are open.
        Timed-out requests without a recorded step are dropped first, as a unit without work would
        keep them forever.
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
        """True if the next plan must be recorded."""
        return any(asked.num_planned < asked.num_steps for asked in self._asked)

    def planned(
        self,
        step_id: int,
        schedule: str,
        num_micro_batches: int,
        num_tokens: int,
        balance: dict[str, float] | None = None,
    ) -> None:
        """Note a recorded plan. `balance`: balance of its ranks by objective (core/balance)."""
        asked = next(asked for asked in self._asked if asked.num_planned < asked.num_steps)
        asked.num_planned += 1
        self._in_flight[step_id] = PlannedStep(
            schedule, num_micro_batches, num_tokens, balance or {}
        )

    def done(self, done: StepDone) -> list[Effect]:
        """Note a done step, in the order of plans; return the answer if it completes a trace."""
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
        """Drop all requests: their front is gone, and the next front numbers its requests from 1 again."""
        self._asked.clear()
        self._in_flight.clear()

    def reset(self) -> None:
        """Forget the steps in flight, which will not be done: later ones are recorded instead."""
        self._in_flight.clear()
        for asked in self._asked:
            asked.num_planned = len(asked.steps)

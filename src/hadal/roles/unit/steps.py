"""Steps of a unit that its Runner has not done yet, oldest first, and their numbers.

Independent of what a step computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from hadal.core.errors import InvariantError
from hadal.core.seams import MAX_STEPS_IN_FLIGHT


class NumberedStep(Protocol):
    """Record of a step in flight."""

    @property
    def step_id(self) -> int: ...


Step = TypeVar("Step", bound=NumberedStep)


class StepsInFlight(Generic[Step]):
    """Queue of plans, numbered from 0 and done in that order."""

    def __init__(self, unit: str) -> None:
        self.next_id = 0
        """Number of the next plan."""
        self._unit = unit
        self._steps: deque[Step] = deque()

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= MAX_STEPS_IN_FLIGHT

    @property
    def done_id(self) -> int:
        """Number of the last plan that is done, or void."""
        return self._steps[0].step_id - 1 if self._steps else self.next_id - 1

    def add(self, step: Step) -> None:
        """Add the plan numbered `next_id`."""
        self._steps.append(step)
        self.next_id += 1

    def take(self, step_id: int) -> Step:
        """Remove and return the oldest step, now done. Raises InvariantError for another step."""
        if not self._steps or self._steps[0].step_id != step_id:
            raise InvariantError(
                f"{self._unit}: step {step_id} is done, but it is not the one that runs."
            )
        return self._steps.popleft()

    def clear(self) -> None:
        """Remove all steps: none of them will be done."""
        self._steps.clear()

    def check(self) -> list[str]:
        """Return problems; empty if no more steps are in flight than allowed."""
        num = len(self._steps)
        return [f"{num} plans are in flight"] if num > MAX_STEPS_IN_FLIGHT else []

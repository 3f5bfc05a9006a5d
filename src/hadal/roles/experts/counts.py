"""Counted steps: the choice of steps in which ranks count tokens per expert slot, and their counts.

A step is counted at the end of an interval, and whenever it is traced. Independent of expert plans
and of time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from hadal.core.messages.questions import Trace
from hadal.core.placement import Placement
from hadal.core.plans import StepDone
from hadal.roles.experts.window import CountsWindow

_NUM_TRACED = 2048
"""Maximum number of traced steps with a balance that is kept until their trace is sent."""


@dataclass(frozen=True, slots=True)
class _CountedStep:
    placement: Placement
    """Placement in force in the step."""
    is_traced: bool
    is_whole: bool
    """True if an interval ends with this step. Other counted steps are only traced: tracing must
    not change decisions.
    """


class ExpertCounts:
    """Token counts of one unit's ranks. `notes`: log lines of its owner."""

    def __init__(self, window: CountsWindow, count_every_steps: int, notes: deque[str]) -> None:
        self.window = window
        self._count_every_steps = count_every_steps
        self._notes = notes
        self._counted: dict[int, _CountedStep] = {}
        """Counted steps in flight, by step id."""
        self._traced: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._is_wrong_noted = False
        self._num_uncounted = 0
        """Steps planned since an interval ended."""

    def ended(self) -> None:
        """Forget the steps in flight, because none of them will finish."""
        self._counted.clear()
        self._num_uncounted = 0
        self.window.drop_part()
        self._is_wrong_noted = False

    def planned(self, step_id: int, placement: Placement, *, is_traced: bool) -> bool:
        """Return whether ranks count tokens in this step. `placement`: in force in the step."""
        self._num_uncounted += 1
        is_whole = self._num_uncounted >= self._count_every_steps
        is_counted = is_traced or is_whole
        if is_counted:
            self._counted[step_id] = _CountedStep(placement, is_traced, is_whole)
        if is_whole:
            self._num_uncounted = 0
        return is_counted

    def done(self, step_id: int, parts: Mapping[int, StepDone]) -> None:
        """Add the counts of a step that all ranks did, if it is a counted one."""
        counted = self._counted.pop(step_id, None)
        if counted is None:
            return
        shape = counted.placement.slot_to_expert_LRS.shape
        counts_LRS = np.zeros(shape, np.int64)
        for rank, part in parts.items():
            if len(part.expert_slot_counts) != 8 * shape[0] * shape[2]:
                if not self._is_wrong_noted:
                    self._notes.append(
                        f"rank {rank} sent {len(part.expert_slot_counts)} bytes of counts for {shape} slots"
                    )
                self._is_wrong_noted = True
                return
            counts_LRS[:, rank] = np.frombuffer(part.expert_slot_counts, np.int64).reshape(
                shape[0], shape[2]
            )
        found = self.window.add(
            counted.placement, counts_LRS, parts.keys(), is_whole=counted.is_whole
        )
        if counted.is_traced and found:
            self._traced[step_id] = found
            while len(self._traced) > _NUM_TRACED:
                self._traced.popitem(last=False)

    def traced(self, trace: Trace) -> Trace:
        """Return the trace with the balancedness of its steps. A step's value covers all tokens
        since the counted step before it.
        """
        steps = tuple(
            msgspec.structs.replace(
                step, balance={**step.balance, **self._traced.pop(step.step_id, {})}
            )
            for step in trace.steps
        )
        return msgspec.structs.replace(trace, steps=steps)

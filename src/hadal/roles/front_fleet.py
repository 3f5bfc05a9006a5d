"""The front's part of a fleet that grows and shrinks: units that drain, and what is asked of all of
them.

A draining unit gets no new request. What it holds goes on there until its deadline; what is left
then is the front's to try elsewhere. The fleet decides who drains; said again, it changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter

from hadal.core.config import DECODE, PREFILL
from hadal.core.fleet import Demand, DrainUnit, KeepUnit, UnitFacts
from hadal.core.front_snapshot import Totals
from hadal.core.messages import SUPERVISOR, Cancel
from hadal.core.request import State
from hadal.core.seams import Send
from hadal.roles.front_handover import Handover
from hadal.roles.front_requests import RequestBook
from hadal.roles.front_units import Unit, UnitBook


class FrontFleet:
    """Marks units in the book as draining. `beat_s`: between two reports; 0: there is no fleet to
    report to.
    """

    def __init__(
        self,
        requests: RequestBook,
        units: UnitBook,
        handover: Handover,
        totals: Totals,
        epoch: str,
        beat_s: float,
    ) -> None:
        self._requests = requests
        self._units = units
        self._handover = handover
        self._totals = totals
        self._epoch = epoch
        self._beat_s = beat_s
        self._said_s = -math.inf

    def handle(self, now_s: float, message: DrainUnit | KeepUnit) -> list[Send]:
        """Begin or end a drain. A unit that is not up has nothing to drain."""
        unit = self._units.by_name.get(message.unit)
        if unit is None:
            return []
        if isinstance(message, KeepUnit):
            unit.drain_by_s, unit.drain_number = None, 0
            return []
        unit.drain_number = message.number
        if unit.drain_by_s is not None:
            return []
        unit.drain_by_s = now_s + message.timeout_s
        # Prompts whose KV was to go there have lost nothing yet: another decode unit is chosen for
        # them.
        released = [
            record
            for record in self._requests.on_unit(unit.name)
            if self._handover.lost(record, unit.name)
        ]
        return [Send(unit.name, Cancel(record.request_id, record.attempt)) for record in released]

    def overdue(self, now_s: float) -> list[str]:
        """Draining units whose deadline has passed."""
        return [
            unit.name
            for unit in self._units.by_name.values()
            if unit.drain_by_s is not None and unit.drain_by_s <= now_s
        ]

    def report(self, now_s: float) -> list[Send]:
        """What the fleet is told, if that is due."""
        if not self._beat_s or now_s - self._said_s < self._beat_s:
            return []
        self._said_s = now_s
        return [Send(SUPERVISOR, self.demand())]

    def demand(self) -> Demand:
        """The sums of this instant."""
        totals, queued = self._totals, self._requests.queued()
        waiting = sum(record.num_tokens for record in queued) + sum(
            u.num_tokens for u in self._units.of_role(PREFILL)
        )
        outputs_waiting = len(queued) * totals.tokens_out // max(1, totals.finished)
        held = self._held()
        units = tuple(
            UnitFacts(
                unit.name,
                unit.role,
                held.get(unit.name, unit.num_requests),
                unit.drain_number,
                _tokens_per_s_max(unit),
            )
            for unit in self._units.by_name.values()
        )
        tokens_in = totals.tokens_in + totals.tokens_refused
        return Demand(self._epoch, tokens_in, totals.tokens_out, waiting, outputs_waiting, units)

    def _held(self) -> dict[str, int]:
        """By draining unit: all that would lose something with it, leased KV included. The others'
        counts will do.
        """
        draining = {
            unit.name: 0 for unit in self._units.by_name.values() if unit.drain_by_s is not None
        }
        if not draining:
            return {}
        owners: Counter[str | None] = Counter()
        for record in self._requests.by_id.values():
            if record.state is not State.QUEUED:
                owners.update({record.prefill_unit, record.decode_unit})
        return {name: owners[name] for name in draining}


def _tokens_per_s_max(unit: Unit) -> float:
    """What the unit would do if it were full, at the speed it measured last; 0: it has not measured
    any.

    A decode step of more requests takes longer, so this says too much of one that is almost empty:
    it is believed where it matters, when the unit is busy.
    """
    load = unit.load
    if load is None or unit.num_requests_max == 0:
        return 0.0
    if unit.role == DECODE:
        step_ms = load.step_ms + load.overhead_ms
        return unit.num_requests_max / step_ms * 1e3 if load.step_ms > 0.0 else 0.0
    return load.num_ranks / load.token_s if load.token_s > 0.0 else 0.0

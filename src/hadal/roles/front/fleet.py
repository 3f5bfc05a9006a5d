"""The front's part of a growing and shrinking fleet: drains of units, and reports of the demand.

A draining unit gets no new request. Its running requests may stay until its deadline; then
the front retries them elsewhere. Prompts in prefill still go to a draining decode unit if no other
one has their weights. The fleet decides which units drain; a repeated message changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter

from hadal.core.config import DECODE, PREFILL
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.fleet import Demand, DrainUnit, KeepUnit, UnitFacts
from hadal.core.messages.snapshot import Totals
from hadal.core.request import State
from hadal.core.seams import Effect, Send
from hadal.roles.front.requests import FrontRequests
from hadal.roles.front.unit import Unit
from hadal.roles.front.units import FrontUnits


class FrontFleet:
    """Drains of units, and demand reports. `heartbeat_s`: interval of reports, seconds. Reports are
    sent while a unit drains, and at all times if the fleet follows the demand (`is_followed`).
    `out` is the front's list of effects, to which this class appends.
    """

    def __init__(
        self,
        requests: FrontRequests,
        units: FrontUnits,
        totals: Totals,
        epoch: str,
        heartbeat_s: float,
        out: list[Effect],
        *,
        is_followed: bool,
    ) -> None:
        self._requests = requests
        self._units = units
        self._totals = totals
        self._epoch = epoch
        self._heartbeat_s = heartbeat_s
        self._is_followed = is_followed
        self._drained = False
        """True if a unit was draining at the last check."""
        self._out = out
        self._said_s = -math.inf

    def handle(self, now_s: float, message: DrainUnit | KeepUnit) -> None:
        """Start or end the drain of a unit. A unit that is not up has nothing to drain."""
        unit = self._units.by_name.get(message.unit)
        if unit is None:
            return
        if isinstance(message, KeepUnit):
            unit.drain_by_s, unit.drain_number = None, 0
        else:
            unit.drain_number = message.number
            if unit.drain_by_s is None:
                unit.drain_by_s = now_s + message.timeout_s

    def overdue(self, now_s: float) -> list[str]:
        """Return draining units past their deadline."""
        return [
            unit.name
            for unit in self._units.by_name.values()
            if unit.drain_by_s is not None and unit.drain_by_s <= now_s
        ]

    def report(self, now_s: float) -> None:
        """Send the demand to the fleet, if a report is due."""
        if now_s - self._said_s < self._heartbeat_s:
            return
        drains = any(unit.drain_number for unit in self._units.by_name.values())
        drained, self._drained = self._drained, drains
        if self._is_followed or drains or drained:  # The end of a drain is reported, too.
            self._said_s = now_s
            self._out.append(Send(SUPERVISOR, self.demand()))

    def demand(self) -> Demand:
        """Return the current demand, with facts of every unit."""
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
                tokens_per_s_max(unit),
            )
            for unit in self._units.by_name.values()
        )
        tokens_in = totals.tokens_in + totals.tokens_refused
        return Demand(self._epoch, tokens_in, totals.tokens_out, waiting, outputs_waiting, units)

    def _held(self) -> dict[str, int]:
        """Return draining unit -> number of requests that need it: requests on it, KV leased by it,
        and prompts in prefill that no other decode unit could take. For other units `num_requests`
        suffices.
        """
        draining = [unit for unit in self._units.by_name.values() if unit.drain_by_s is not None]
        if not draining:
            return {}
        owners: Counter[str | None] = Counter()
        fingerprint_to_coming: Counter[str] = Counter()
        for record in self._requests.by_id.values():
            if record.state is not State.QUEUED:
                owners.update({record.prefill_unit, record.decode_unit})
                fingerprint_to_coming[record.fingerprint] += record.decode_unit is None
        return {
            unit.name: owners[unit.name]
            + (
                fingerprint_to_coming[unit.fingerprint]
                if unit.role == DECODE and not self._units.has_open_decode(unit.fingerprint)
                else 0
            )
            for unit in draining
        }


def tokens_per_s_max(unit: Unit) -> float:
    """Return the unit's tokens/s when full, at its last measured speed; 0 if none is measured.

    A decode step of more requests takes longer, so the value is too high for an almost empty unit.
    It is accurate when the unit is busy, and only then it matters.
    """
    load = unit.load
    if load is None or unit.num_requests_max == 0:
        return 0.0
    if unit.role == DECODE:
        step_ms = load.step_ms + load.overhead_ms
        return (
            unit.num_requests_max * unit.tokens_step / step_ms * 1e3 if load.step_ms > 0.0 else 0.0
        )
    return load.num_ranks / load.token_s if load.token_s > 0.0 else 0.0

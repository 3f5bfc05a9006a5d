"""The front's part of a fleet that grows and shrinks: draining units, and the reports to the fleet.

A draining unit gets no new request. Its running requests go on there until its deadline, and so do
prompts being prefilled if no other decode unit of their weights is left; the front retries the rest
elsewhere. The fleet decides which units drain; a repeated message changes nothing.
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
    """Marks units as draining. `heartbeat_s`: between two reports, which are made while a unit
    drains and, where the fleet follows the demand (`is_followed`), all the time. `out` is the
    front's list of effects, which this appends to.
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
        """Whether a unit drained when it was looked last."""
        self._out = out
        self._said_s = -math.inf

    def heard(self, now_s: float, message: DrainUnit | KeepUnit) -> None:
        """Begin or end a drain. A unit that is not up has nothing to drain."""
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
        """Draining units whose deadline has passed."""
        return [
            unit.name
            for unit in self._units.by_name.values()
            if unit.drain_by_s is not None and unit.drain_by_s <= now_s
        ]

    def report(self, now_s: float) -> None:
        """Tell the fleet how much is asked for, if that is due."""
        if now_s - self._said_s < self._heartbeat_s:
            return
        drains = any(unit.drain_number for unit in self._units.by_name.values())
        drained, self._drained = self._drained, drains
        if self._is_followed or drains or drained:  # Its end is told, too.
            self._said_s = now_s
            self._out.append(Send(SUPERVISOR, self.demand()))

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
                tokens_per_s_max(unit),
            )
            for unit in self._units.by_name.values()
        )
        tokens_in = totals.tokens_in + totals.tokens_refused
        return Demand(self._epoch, tokens_in, totals.tokens_out, waiting, outputs_waiting, units)

    def _held(self) -> dict[str, int]:
        """Draining unit -> all that would lose something with it: leased KV, and prompts that are
        prefilled for whichever decode unit is left. The others' counts will do.
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
        return (
            unit.num_requests_max * unit.tokens_step / step_ms * 1e3 if load.step_ms > 0.0 else 0.0
        )
    return load.num_ranks / load.token_s if load.token_s > 0.0 else 0.0

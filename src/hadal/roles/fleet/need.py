"""Number of units that a fleet needs: decided by `policy/scaling` from the demand, at every review.

Owns the demand, the needs of the last minutes and the decision. It starts no units: the fleet
(roles/fleet/fleet) compares the wanted units with the existing ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from hadal.core.config import DECODE, PREFILL
from hadal.core.messages.fleet import Demand, UnitFacts
from hadal.core.overview import FleetChange, RoleSeen
from hadal.policy.demand import FLAT, DayShape, forecast
from hadal.policy.scaling import (
    Decision,
    RoleRules,
    RoleView,
    ScalingRules,
    ScalingView,
    Units,
    decide,
)
from hadal.roles.fleet.demand import DemandMeter

_NUM_CHANGES = 64
"""Number of last decisions kept for display."""
_NUM_AHEAD = 25
"""Number of points of a displayed forecast."""


class FleetNeed:
    """Units wanted by these rules; the floor until the first review.

    `role_to_tokens_per_s`: tokens/s of one unit within the latency target; 0: use the rates that
    units report. `day_s`: time of day at which the clock showed 0.
    """

    def __init__(
        self,
        rules: ScalingRules,
        role_to_tokens_per_s: Mapping[str, float],
        *,
        shape: DayShape = FLAT,
        day_s: float = 0.0,
    ) -> None:
        self.units = rules.floor
        """Wanted units."""
        self.decision: Decision | None = None
        self.num_reviews = 0
        self.review_s = -math.inf
        """Time of the next review."""
        self.changes: deque[FleetChange] = deque(maxlen=_NUM_CHANGES)
        """Decisions that changed the wanted units."""
        self._rules = rules
        self._role_to_tokens_per_s = role_to_tokens_per_s
        self._day_s = day_s
        self._meter = DemandMeter(rules.period_s, shape)
        self._facts: tuple[UnitFacts, ...] = ()
        self._levels = rules.floor
        self._held: deque[tuple[float, float, float]] = deque()
        """(time, need of prefill, need of decode) over the last `hold_s` seconds."""

    def demanded(self, now_s: float, demand: Demand) -> None:
        """Note the front's counters and the units' facts."""
        self._meter.add(self.time_of_day_s(now_s), demand)
        self._facts = demand.units

    def found(self, now_s: float, units: Units) -> None:
        """Count running units as needed for `hold_s` seconds, even without demand for them."""
        floor = self._rules.floor
        self._levels = Units(max(units.prefill, floor.prefill), max(units.decode, floor.decode))
        self._held.append((now_s, float(units.prefill), float(units.decode)))

    def tick(self, now_s: float) -> None:
        """Review the demand if a review is due."""
        if now_s >= self.review_s:
            self._review(now_s)

    def time_of_day_s(self, now_s: float) -> float:
        """Return the seconds since the midnight before the clock's 0."""
        return now_s + self._day_s

    def role_rules(self, role: str) -> RoleRules:
        """Return the rules for units of a role."""
        return self._rules.prefill if role == PREFILL else self._rules.decode

    def num_wanted(self, role: str) -> int:
        """Return the wanted number of units of a role."""
        return self.units.prefill if role == PREFILL else self.units.decode

    def _review(self, now_s: float) -> None:
        self.review_s = now_s + self._rules.period_s
        while self._held and self._held[0][0] < now_s - self._rules.hold_s:
            self._held.popleft()
        view = ScalingView(
            self.time_of_day_s(now_s),
            self._view(PREFILL, max((need for _, need, _ in self._held), default=0.0)),
            self._view(DECODE, max((need for _, _, need in self._held), default=0.0)),
            self._levels,
        )
        self.decision = decision = decide(view, self._rules)
        self._held.append((now_s, decision.need_prefill, decision.need_decode))
        self.num_reviews += 1
        if decision.units != self.units:
            change = decision.units.prefill, decision.units.decode, str(decision.why)
            self.changes.append(FleetChange(self.time_of_day_s(now_s), *change))
        self._levels, self.units = decision.levels, decision.units

    def _view(self, role: str, need_held: float) -> RoleView:
        return RoleView(
            tuple(self._meter.times_s),
            tuple(self._meter.rates[role]),
            self._capacity(role),
            self._meter.backlog[role],
            self._meter.shape(role),
            need_held,
        )

    def _capacity(self, role: str) -> float:
        """Return tokens/s of one unit; without measurement infinity, which no demand exceeds."""
        if self._role_to_tokens_per_s[role]:
            return self._role_to_tokens_per_s[role]
        known = [facts.tokens_per_s_max for facts in self._facts if facts.role == role]
        known = [rate for rate in known if rate > 0.0]
        return sum(known) / len(known) if known else math.inf

    def seen(self, now_s: float, role: str, states: dict[str, int]) -> RoleSeen:
        """Return a role's demand, forecast and wanted units, with its units' `states`, for people."""
        rules, view, capacity = self._rules, self._view(role, 0.0), self._capacity(role)
        horizon_s = rules.start_s + max(rules.period_s, rules.hold_s)
        ahead_s = np.linspace(0.0, horizon_s, _NUM_AHEAD)
        day_s = self.time_of_day_s(now_s)
        expected = forecast(view.times_s, view.rates, view.shape, day_s, ahead_s)
        return RoleSeen(
            self.num_wanted(role),
            states,
            view.times_s,
            tuple(round(rate, 2) for rate in view.rates),
            tuple(ahead_s.tolist()),
            tuple(np.round(expected, 2).tolist()),
            capacity * self.role_rules(role).use if math.isfinite(capacity) else 0.0,
        )

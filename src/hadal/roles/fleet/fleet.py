"""Fleet: starts units when demand rises, drains them when it falls, and replaces dead units.

Decides nothing about requests: it informs the front (router) of drains, and the front reports when
a unit is empty. On every event the wanted units (policy/scaling) are compared with the existing
ones, so that the next event repairs any error:

    too few up or starting   keep a draining one, else start a stopped one (limits: nodes, back-off)
    too many up or starting  stop a starting one, else drain: old ones first, then the least busy

    DrainUnit -> front ... Demand: the unit is empty -> StopUnit ... UnitDown -> OfferNodes for other work

A rollout replaces all units in the same way: once all wanted units are up, the next old one is
drained, and the missing one is started.

Independent of processes, hosts and the wall clock; `day_s` gives the time of day of the clock's 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from hadal.core.config import DECODE, PREFILL, ROLES, Deployment
from hadal.core.errors import ConfigError, InvariantError
from hadal.core.messages.fleet import Demand, DrainUnit, KeepUnit, Rollout, UnitFacts, UnitsFound
from hadal.core.messages.units import UnitDown, UnitUp
from hadal.core.overview import FleetSeen
from hadal.core.seams import (
    Event,
    FleetEffect,
    OfferNodes,
    Send,
    StartUnit,
    StopUnit,
    Tick,
    WakeAt,
    WithdrawNodes,
)
from hadal.policy.demand import FLAT, DayShape
from hadal.policy.scaling import RoleRules, ScalingRules, Units
from hadal.roles.fleet.need import FleetNeed
from hadal.roles.fleet.units import OWNS_NODES, FleetUnit, UnitMove, UnitState, UnitTable

FRONT = "front"
RESEND_S = 10.0
"""Seconds after which a message to drain, keep or stop a unit is repeated if it had no effect."""
DRAIN_GRACE_S = 30.0
"""Seconds after a drain's deadline at which a unit is stopped; its requests are then retried."""
BACKOFF_S = 5.0
"""Seconds before the next start of a role's unit after a failed one; doubled with each failure in a
row, up to BACKOFF_MAX_S.
"""
BACKOFF_MAX_S = 300.0
START_FACTOR = 10.0
START_TIMEOUT_MIN_S = 600.0
"""Minimum start timeout, seconds. A unit that is not up after START_FACTOR start-up times and after
this time is stopped, and its start counts as failed.
"""


class Fleet:
    """State machine of `rules.num_nodes_max` nodes and the units on them. It begins without units;
    `start` starts the minimum number (the floor).
    """

    def __init__(
        self,
        rules: ScalingRules,
        *,
        prefill_tokens_per_s: float = 0.0,
        decode_tokens_per_s: float = 0.0,
        drain_timeout_s: float = 120.0,
        shape: DayShape = FLAT,
        day_s: float = 0.0,
    ) -> None:
        """`..._tokens_per_s`: tokens/s of one unit within the latency target; 0: use the rates that
        units report. `day_s`: time of day at which the clock showed 0.
        """
        self.need = FleetNeed(
            rules,
            {PREFILL: prefill_tokens_per_s, DECODE: decode_tokens_per_s},
            shape=shape,
            day_s=day_s,
        )
        self.rules = rules
        self.table = UnitTable({PREFILL: rules.prefill.num_max, DECODE: rules.decode.num_max})
        self._drain_timeout_s = drain_timeout_s
        self._unit_nodes = {PREFILL: rules.prefill.unit_nodes, DECODE: rules.decode.unit_nodes}
        self._facts: dict[str, UnitFacts] = {}
        self._num_offered = 0
        self._num_drains = 0
        self._num_failed: dict[str, int] = dict.fromkeys(ROLES, 0)
        """Role -> failed starts in a row."""
        self._not_before_s: dict[str, float] = dict.fromkeys(ROLES, -math.inf)
        self._wake_s = math.inf
        self._out: list[FleetEffect] = []

    # ---- events ----
    def start(self, now_s: float) -> list[FleetEffect]:
        """Return the first effects: start the minimum of units, and offer the unused nodes."""
        self._out.clear()
        self._go_on(now_s)
        return [*self._out]

    def handle(self, now_s: float, event: Event) -> list[FleetEffect]:
        """Process one event, and return the effects in order."""
        self._out.clear()
        match event:
            case Demand():
                self.need.demanded(now_s, event)
                self._facts = {facts.unit: facts for facts in event.units}
            case UnitUp():
                self._up(now_s, event)
            case UnitsFound(units):
                self._found(now_s, units)
            case UnitDown(unit):
                self._down(now_s, unit)
            case Rollout():
                for one in self.table.in_state(*OWNS_NODES):
                    one.is_old = True
                for role in ROLES:  # Failed starts were of the version being replaced.
                    self._num_failed[role], self._not_before_s[role] = 0, -math.inf
            case Tick():
                pass
            case _:
                raise InvariantError(f"the fleet cannot handle {type(event).__name__}")
        self._go_on(now_s)
        return [*self._out]

    @property
    def num_nodes(self) -> int:
        """Nodes owned by units now."""
        return sum(self.role_to_nodes().values())

    @property
    def num_unreplaced(self) -> int:
        """Units that the last rollout must still replace or, if more, starting units plus roles
        with failed starts. 0: the rollout is complete.
        """
        num_coming = len(self.table.in_state(UnitState.STARTING))
        return max(len(self._old_ones()), num_coming + sum(map(bool, self._num_failed.values())))

    @property
    def num_failed(self) -> int:
        """Failed starts in a row, summed over roles."""
        return sum(self._num_failed.values())

    def role_to_nodes(self) -> dict[str, int]:
        """Return role -> nodes owned by its units now."""
        return {role: self.table.num_owning(role) * self._unit_nodes[role] for role in ROLES}

    def _go_on(self, now_s: float) -> None:
        self.need.tick(now_s)
        self._settle(now_s)
        self._roll_out(now_s)
        for role in ROLES:
            self._shrink(now_s, role)
        self._grow(now_s)
        num_free = self.rules.num_nodes_max - self.num_nodes
        num_more, self._num_offered = num_free - self._num_offered, num_free
        if num_more < 0:
            self._out.insert(0, WithdrawNodes(-num_more))  # Before units are started on them.
        elif num_more > 0:
            self._out.append(OfferNodes(num_more))
        self._wake(now_s)

    def _found(self, now_s: float, names: Collection[str]) -> None:
        """Take over running units. They count as needed until `hold_s` passes without a need."""
        for name in names:
            self.table.move(self.table.by_name[name], UnitMove.START, now_s)
            self.table.move(self.table.by_name[name], UnitMove.READY, now_s)
        self.need.found(now_s, Units(*(self.table.num_working(role) for role in ROLES)))

    def _up(self, now_s: float, message: UnitUp) -> None:
        unit = self.table.by_name.get(message.unit)
        if unit is None:
            return  # Not a unit of this fleet.
        if unit.state is UnitState.STARTING:
            self.table.move(unit, UnitMove.READY, now_s)
            self._num_failed[unit.role], self._not_before_s[unit.role] = 0, -math.inf

    def _down(self, now_s: float, name: str) -> None:
        unit = self.table.by_name.get(name)
        if unit is None or unit.state is UnitState.STOPPED:
            return
        if unit.state is UnitState.STARTING:
            self._failed(now_s, unit)
        self.table.move(unit, UnitMove.END, now_s)

    def _failed(self, now_s: float, unit: FleetUnit) -> None:
        self._num_failed[unit.role] += 1
        backoff_s = min(BACKOFF_S * 2.0 ** min(self._num_failed[unit.role] - 1, 30), BACKOFF_MAX_S)
        self._not_before_s[unit.role] = now_s + backoff_s

    # ---- from existing to wanted units ----
    def _settle(self, now_s: float) -> None:
        """Stop drained and overdue units, and repeat messages without effect."""
        timeout_s = max(START_FACTOR * self.rules.start_s, START_TIMEOUT_MIN_S)
        for unit in self.table.by_name.values():
            if unit.state is UnitState.STOPPED:
                continue
            facts = self._facts.get(unit.name)
            if unit.state is UnitState.STARTING and now_s - unit.since_s > timeout_s:
                self._failed(now_s, unit)
                self._stop(now_s, unit)
            elif unit.state is UnitState.STOPPING:
                if now_s - unit.asked_s >= RESEND_S:
                    self._ask(now_s, unit, StopUnit(unit.name))
            elif unit.state is UnitState.DRAINING:
                self._settle_drain(now_s, unit, facts)
            elif unit.state is UnitState.UP and facts is not None and facts.drain_number:
                self._settle_keep(now_s, unit)

    def _settle_drain(self, now_s: float, unit: FleetUnit, facts: UnitFacts | None) -> None:
        drained_s = now_s - unit.since_s
        is_reported = facts is not None and facts.drain_number == unit.drain_number
        is_empty = is_reported and facts is not None and facts.num_requests == 0
        if is_empty or drained_s >= self._drain_timeout_s + DRAIN_GRACE_S:
            self._stop(now_s, unit)
        elif not is_reported and now_s - unit.asked_s >= RESEND_S:
            # A drain is lost with the front that died; the next front gets it here.
            self._ask_drain(now_s, unit, max(0.0, self._drain_timeout_s - drained_s))

    def _settle_keep(self, now_s: float, unit: FleetUnit) -> None:
        if now_s - unit.asked_s >= RESEND_S:
            self._ask(now_s, unit, Send(FRONT, KeepUnit(unit.name)))

    def _ask_drain(self, now_s: float, unit: FleetUnit, timeout_s: float) -> None:
        self._ask(now_s, unit, Send(FRONT, DrainUnit(unit.name, timeout_s, unit.drain_number)))

    def _roll_out(self, now_s: float) -> None:
        """Drain the next old unit once the last one is replaced. If a new unit does not start, the
        rollout pauses and the old units continue.
        """
        if not self._old_ones():
            return
        for unit in self._old_ones(UnitState.STARTING):
            self._stop(now_s, unit)  # It serves no requests yet.
        on_their_way = self.table.in_state(
            UnitState.STARTING, UnitState.DRAINING, UnitState.STOPPING
        )
        if on_their_way or any(map(self._is_short, ROLES)):
            return
        old = self._old_ones(UnitState.UP)
        # Prefill units with new weights serve only decode units with new weights, so both roles
        # are replaced at the same pace.
        left = Counter(unit.role for unit in old)
        shares = {role: left[role] / self.table.num_owning(role) for role in left}
        self._drain(
            now_s, min(old, key=lambda unit: (-shares[unit.role], unit.role, self._held_by(unit)))
        )

    def _old_ones(self, *states: UnitState) -> list[FleetUnit]:
        """Return old units in these states; without arguments, in all states."""
        return [unit for unit in self.table.in_state(*(states or UnitState)) if unit.is_old]

    def _drain(self, now_s: float, unit: FleetUnit) -> None:
        self.table.move(unit, UnitMove.DRAIN, now_s)
        self._num_drains += 1
        unit.drain_number = self._num_drains
        self._ask_drain(now_s, unit, self._drain_timeout_s)

    def _shrink(self, now_s: float, role: str) -> None:
        num_over = self.table.num_working(role) - self.need.num_wanted(role)
        if num_over <= 0:
            return
        starting = sorted(
            self.table.of_role(role, UnitState.STARTING), key=lambda unit: -unit.since_s
        )
        up = sorted(
            self.table.of_role(role, UnitState.UP),
            key=lambda unit: (not unit.is_old, self._held_by(unit)),
        )
        for unit in [*starting, *up][:num_over]:
            if unit.state is UnitState.STARTING:
                self._stop(now_s, unit)
            else:
                self._drain(now_s, unit)

    def _grow(self, now_s: float) -> None:
        """Add missing units one at a time, of the role with the smaller share of its wanted units."""
        blocked: set[str] = set()
        while True:
            shares = {
                role: self.table.num_working(role) / self.need.num_wanted(role) for role in ROLES
            }
            short = [role for role in ROLES if shares[role] < 1.0 and role not in blocked]
            if not short:
                return
            role = min(short, key=lambda role: shares[role])
            if not self._add(now_s, role):
                blocked.add(role)

    def _add(self, now_s: float, role: str) -> bool:
        draining = self.table.of_role(role, UnitState.DRAINING)
        kept = sorted((unit for unit in draining if not unit.is_old), key=self._held_by)
        if kept:
            unit = kept[-1]
            self.table.move(unit, UnitMove.KEEP, now_s)
            self._ask(now_s, unit, Send(FRONT, KeepUnit(unit.name)))
            return True
        unit_nodes = self.need.role_rules(role).unit_nodes
        stopped = next(self.table.of_role(role, UnitState.STOPPED), None)
        has_nodes = self.num_nodes + unit_nodes <= self.rules.num_nodes_max
        if stopped is None or not has_nodes or now_s < self._not_before_s[role]:
            return False
        self.table.move(stopped, UnitMove.START, now_s)
        self._ask(now_s, stopped, StartUnit(stopped.name, role))
        return True

    def _held_by(self, unit: FleetUnit) -> tuple[int, int]:
        """Return a sort key: fewest requests first, then highest index, to keep indices low."""
        facts = self._facts.get(unit.name)
        return facts.num_requests if facts is not None else 0, -unit.index

    def _stop(self, now_s: float, unit: FleetUnit) -> None:
        self.table.move(unit, UnitMove.STOP, now_s)
        self._ask(now_s, unit, StopUnit(unit.name))

    def _ask(self, now_s: float, unit: FleetUnit, effect: FleetEffect) -> None:
        unit.asked_s = now_s
        self._out.append(effect)

    def _wake(self, now_s: float) -> None:
        """Request a wake-up at the next review; earlier if units change state or starts back off."""
        is_busy = bool(
            self.table.in_state(UnitState.STARTING, UnitState.DRAINING, UnitState.STOPPING)
        )
        wake_s = min(self.need.review_s, now_s + RESEND_S) if is_busy else self.need.review_s
        waiting = [
            s for role, s in self._not_before_s.items() if s > now_s and self._is_short(role)
        ]
        wake_s = min([wake_s, *waiting])
        if self._wake_s <= now_s or wake_s < self._wake_s:
            self._wake_s = wake_s
            self._out.append(WakeAt(wake_s))

    def _is_short(self, role: str) -> bool:
        return self.table.num_working(role) < self.need.num_wanted(role)

    # ---- reports ----
    def check(self) -> list[str]:
        """Return problems; empty when nodes add up and units in each state fit the wanted numbers."""
        problems = []
        most, owned = self.rules.num_nodes_max, self.num_nodes
        if owned > most:
            problems.append(f"units own {owned} nodes, but there are {most}")
        if owned + self._num_offered != most:
            problems.append(f"{owned} nodes are owned and {self._num_offered} offered, of {most}")
        for role in ROLES:
            num_working, num_wanted = self.table.num_working(role), self.need.num_wanted(role)
            if num_working > num_wanted:
                problems.append(
                    f"{num_working} {role} units work or start, {num_wanted} are wanted"
                )
            draining = self.table.of_role(role, UnitState.DRAINING)
            if num_working < num_wanted and not all(unit.is_old for unit in draining):
                problems.append(
                    f"a {role} unit drains while {num_wanted - num_working} more are wanted"
                )
            rules = self.need.role_rules(role)
            if not rules.num_min <= num_wanted <= rules.num_max:
                problems.append(f"{num_wanted} {role} units are wanted, out of bounds")
        return problems

    def seen(self, now_s: float) -> FleetSeen:
        """Return demand, forecast, wanted and existing units, and the reason, for people."""
        roles = {}
        for role in ROLES:
            states = {
                str(state): sum(1 for _ in self.table.of_role(role, state)) for state in UnitState
            }
            roles[role] = self.need.seen(now_s, role, states)
        need = self.need
        return FleetSeen(
            need.time_of_day_s(now_s),
            self.num_nodes,
            self.rules.num_nodes_max,
            str(need.decision.why) if need.decision is not None else "",
            roles,
            tuple(need.changes),
        )

    def counts(self) -> dict[UnitState, Units]:
        """Return units by state, for logs and reports."""
        return {
            state: Units(*(sum(1 for _ in self.table.of_role(role, state)) for role in ROLES))
            for state in UnitState
        }


def rules_of(deployment: Deployment) -> ScalingRules:
    """Return a deployment's rules: its [fleet] table, with `units` of each role as minimum.

    A unit smaller than a node counts as one node. Raises ConfigError for contradictory rules.
    """
    fleet = deployment.fleet

    def role(name: str) -> RoleRules:
        is_prefill = name == PREFILL
        units = deployment.prefill if is_prefill else deployment.decode
        return RoleRules(
            unit_nodes=-(-units.ranks // units.ranks_per_node),
            use=fleet.prefill_use if is_prefill else fleet.decode_use,
            num_min=units.units,
            num_max=deployment.num_units_max(name),
            num_bundle=fleet.bundle_prefill if is_prefill else fleet.bundle_decode,
        )

    prefill, decode = role(PREFILL), role(DECODE)
    try:
        return ScalingRules(
            prefill,
            decode,
            prefill.num_max * prefill.unit_nodes + decode.num_max * decode.unit_nodes,
            start_s=fleet.start_s,
            period_s=fleet.period_s,
            hold_s=fleet.hold_s,
            catch_up_s=fleet.start_s,
        )
    except ValueError as error:
        raise ConfigError(f"fleet: {error}") from error


def make_fleet(deployment: Deployment, day_s: float) -> Fleet:
    """Return a deployment's fleet. `day_s`: time of day at which its clock showed 0."""
    fleet = deployment.fleet
    return Fleet(
        rules_of(deployment),
        prefill_tokens_per_s=fleet.prefill_tokens_per_s,
        decode_tokens_per_s=fleet.decode_tokens_per_s,
        drain_timeout_s=fleet.drain_timeout_s,
        day_s=day_s,
    )

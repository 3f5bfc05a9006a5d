"""Day as a fluid: demand flows through units that the real fleet role starts and drains.

Simulated windows model every request, but only for seconds. The fluid gives the number of nodes and
the queues at each minute of the day. The fleet is roles/fleet with policy/scaling; it receives the
reports that a front would send. Units need time to start, may fail to start, and die. All
randomness comes from one generator that the caller passes in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hadal.core.config import DECODE, ROLES
from hadal.core.errors import InvariantError
from hadal.core.messages.fleet import Demand, DrainUnit, KeepUnit, UnitFacts
from hadal.core.messages.units import UnitDown, UnitUp
from hadal.core.seams import Event, FleetEffect, Send, StartUnit, StopUnit, Tick, WakeAt
from hadal.lab.sim.day.hours import Day, Hours
from hadal.lab.sim.day.published import DemandCurve
from hadal.lab.sim.day.vessels import Engine, UnitModel
from hadal.policy.demand import DAY_S
from hadal.roles.fleet.fleet import Fleet
from hadal.roles.fleet.units import UnitState


@dataclass(frozen=True)
class Faults:
    """Fault rates, and durations of starts and stops."""

    start_s: float = 600.0
    """Seconds from the decision until a unit is ready: other work frees nodes, weights are read."""
    start_spread: float = 0.1
    """Spread of `start_s`: uniform, plus or minus this share."""
    start_fail_share: float = 0.0
    """Share of starts that fail. A failure is reported when the start should have been done."""
    stop_s: float = 30.0
    node_failures_per_s: float = 0.0
    """Failures per second of one node; its unit dies with it."""
    noise: float = 0.02
    """Standard deviation of a step's arrivals around the demand curve, as a share."""


class FluidDay:
    """One run of a fluid. `start` and times that the fleet gets are seconds since midnight."""

    def __init__(
        self,
        fleet: Fleet,
        demand: DemandCurve,
        model: UnitModel,
        faults: Faults,
        random: np.random.Generator,
        *,
        start: float = 0.0,
        step_s: float = 60.0,
    ) -> None:
        self.fleet = fleet
        self.engine = Engine(model, demand.tokens_in_request, demand.tokens_out_request)
        self.now_s = start
        self._demand = demand
        self._faults = faults
        self._random = random
        self._step_s = step_s
        self._due: list[tuple[float, int, Event]] = []
        """Heap of events for the fleet: (time, number that breaks ties, event)."""
        self._num_events = 0
        self._drains: dict[str, tuple[float, int]] = {}
        """Unit -> (deadline, number) of its drain, as a front would have them."""
        self._ending: set[str] = set()
        """Units with a pending UnitDown after a stop or a node failure; they get no second one."""
        self._apply(fleet.start(start))

    def run(self, num_steps: int) -> Day:
        """Run `num_steps` steps and return their sums by hour."""
        hours = Hours(self.engine, self.fleet)
        for _ in range(num_steps):
            self.step()
            hours.add(self.now_s, self._step_s)
        return hours.done()

    def run_day(self) -> Day:
        """Run 24 hours and return their sums by hour."""
        return self.run(round(DAY_S / self._step_s))

    def step(self) -> None:
        """Advance the fluid one step, then pass the events due and a demand report to the fleet."""
        middle_s = self.now_s + 0.5 * self._step_s
        noise = max(0.0, 1.0 + self._faults.noise * float(self._random.standard_normal()))
        self.engine.step(self._demand.requests_per_s(middle_s) * self._step_s * noise, self._step_s)
        self._kill()
        end_s = self.now_s + self._step_s
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._due)
            self._happens(event)
        self.now_s = end_s
        self._end_drains()
        self._tell(self._report())

    # ---- events of units ----
    def _happens(self, event: Event) -> None:
        if isinstance(event, UnitUp):
            self.engine.up(event.unit, is_decode=event.role == DECODE)
        elif isinstance(event, UnitDown):
            self._ending.discard(event.unit)
            self._drains.pop(event.unit, None)
            self.engine.down(event.unit)
        self._tell(event)

    def _kill(self) -> None:
        """Draw the node failures of one step; a failed node ends its unit."""
        if not self._faults.node_failures_per_s:
            return
        rules = self.fleet.rules
        for unit in self.fleet.table.in_state(UnitState.UP, UnitState.DRAINING):
            if unit.name in self._ending:
                continue
            num_nodes = (rules.decode if unit.role == DECODE else rules.prefill).unit_nodes
            share = -np.expm1(-self._faults.node_failures_per_s * num_nodes * self._step_s)
            if self._random.random() < share:
                self._ending.add(unit.name)
                self._later(0.0, UnitDown(unit.name, "a node failed"))

    def _apply(self, effects: Iterable[FleetEffect]) -> None:
        for effect in effects:
            match effect:
                case StartUnit(unit, role):
                    spread = self._faults.start_spread * float(self._random.uniform(-1.0, 1.0))
                    fails = self._random.random() < self._faults.start_fail_share
                    event = (
                        UnitDown(unit, "it did not start")
                        if fails
                        else UnitUp(unit, role, f"{self.now_s}", 1, 1)
                    )
                    self._later(self._faults.start_s * (1.0 + spread), event)
                case StopUnit(unit):
                    self._stop(unit)
                case Send(_, DrainUnit(unit, timeout_s, number)):
                    deadline_s, _ = self._drains.get(unit, (self.now_s + timeout_s, 0))
                    self._drains[unit] = deadline_s, number
                    self.engine.open(unit, False)
                case Send(_, KeepUnit(unit)):
                    self._drains.pop(unit, None)
                    self.engine.open(unit, True)
                case WakeAt(time_s):
                    self._later(max(0.0, time_s - self.now_s), Tick())
                case _:
                    pass  # Offers of unused nodes to other jobs do not affect units.

    def _stop(self, unit: str) -> None:
        """End a unit now, report it down after `stop_s`, and cancel its start if in progress."""
        if unit in self._ending:
            return
        self._due = [one for one in self._due if getattr(one[2], "unit", None) != unit]
        heapq.heapify(self._due)
        self._ending.add(unit)
        self.engine.down(unit)
        self._later(self._faults.stop_s, UnitDown(unit, "stopped"))

    def _end_drains(self) -> None:
        for unit, (deadline_s, _) in self._drains.items():
            if deadline_s <= self.now_s and self.engine.held.get(unit, 0.0) > 0.0:
                self.engine.give_back(unit)

    def _later(self, delay_s: float, event: Event) -> None:
        self._num_events += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._num_events, event))

    # ---- events for the fleet ----
    def _tell(self, event: Event) -> None:
        self._apply(self.fleet.handle(self.now_s, event))
        problems = self.fleet.check()
        if problems:
            raise InvariantError(f"after {type(event).__name__} at {self.now_s:g} s: {problems}")

    def _report(self) -> Demand:
        """Return the demand as roles/front/front would report it. Requests on a unit are rounded
        down, because a fluid never reaches 0.
        """
        engine = self.engine
        units = tuple(
            UnitFacts(
                unit, role, int(engine.held.get(unit, 0.0)), self._drains.get(unit, (0.0, 0))[1]
            )
            for role in ROLES
            for unit in (engine.decode_units if role == DECODE else engine.prefill_units)
        )
        return Demand(
            "fluid",
            round(engine.num_arrived * engine.tokens_in_request),
            round(engine.tokens_out),
            round(engine.prefill_queue * engine.tokens_in_request),
            round(engine.decode_queue * engine.tokens_out_request),
            units,
        )

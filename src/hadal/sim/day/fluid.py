"""The day as a fluid: demand flows through units that the real fleet role starts and drains.

Between simulated windows, in which every request is one, this says how many nodes there are at each
minute, and what waits. The fleet is roles/fleet with policy/scaling, which hears what a front would
say; units take time to start, fail to, die. One generator, given in, is all that is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from hadal.core.config import DECODE, PREFILL, ROLES
from hadal.core.errors import InvariantError
from hadal.core.messages import Demand, DrainUnit, KeepUnit, UnitDown, UnitFacts, UnitUp
from hadal.core.seams import Event, FleetEffect, Send, StartUnit, StopUnit, Tick, WakeAt
from hadal.policy.demand import DAY_S, Floats
from hadal.roles.fleet import Fleet, UnitState
from hadal.sim.day.clock import HOUR_S, DemandCurve

# Prefill and decode units as vessels: requests are a fluid, which flows in, is worked on and
# flows out.
#
#     arrivals -> prefill queue -> decode queue -> N requests on each decode unit -> finished
#                      ^______________ given back: a drain's deadline, a unit that died
#
# A decode unit with N requests gives each a token every tpot(N / ranks) seconds, so they leave at N
# / (tokens of one x tpot) (Little's law), and over a step with an even inflow
#
#     N(t + dt) = N_inf + (N - N_inf) e^(-dt / tau),   tau = tokens of a request x tpot,   N_inf = inflow x tau
#
# What flows out is what flowed in less what stayed, so that nothing is lost by rounding. A request
# that is given back has on average as much before it as a new one: lengths are taken to be
# exponential.


Tpot = Callable[[Floats], Floats]
"""Requests of a rank -> seconds per output token of each. Rises."""


@dataclass(frozen=True)
class UnitModel:
    """What units do, as a step model prices it or as it was measured."""

    prefill_tokens_per_s: float
    """Tokens/s of a prefill unit, prompt tokens out of a cache among them."""
    decode_ranks: int
    """Ranks of a decode unit."""
    tpot_s: Tpot
    batch_max: float
    """Requests of a decode rank, at most: by memory, or by slots."""


@dataclass
class Engine:
    """All units that are up, and what is in them, in requests. Times are steps of any length."""

    model: UnitModel
    tokens_in_request: float
    tokens_out_request: float
    prefill_units: dict[str, bool] = field(default_factory=dict)
    """Up: whether new requests may go there."""
    decode_units: dict[str, bool] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    """Requests on each decode unit."""
    num_arrived: float = 0.0
    num_prefilled: float = 0.0
    num_returned: float = 0.0
    num_finished: float = 0.0
    prefill_queue: float = 0.0
    decode_queue: float = 0.0
    held_s: float = 0.0
    """Seconds that requests were on decode units, summed."""

    @property
    def tokens_out(self) -> float:
        """All output tokens so far of those that have finished (lengths are exponential)."""
        return self.num_finished * self.tokens_out_request

    def up(self, unit: str, *, is_decode: bool) -> None:
        """A unit begins to work, empty."""
        (self.decode_units if is_decode else self.prefill_units)[unit] = True
        if is_decode:
            self.held[unit] = 0.0

    def down(self, unit: str) -> None:
        """A unit ends, or dies: what is on it goes back to the prefill queue."""
        self.prefill_units.pop(unit, None)
        if self.decode_units.pop(unit, None) is not None:
            self.give_back(unit)
            del self.held[unit]

    def give_back(self, unit: str) -> None:
        """All on this decode unit is prefilled again elsewhere."""
        self.num_returned += self.held[unit]
        self.prefill_queue += self.held[unit]
        self.held[unit] = 0.0

    def open(self, unit: str, is_open: bool) -> None:
        """New requests may, or may not, go to a unit that is up."""
        for units in (self.prefill_units, self.decode_units):
            if unit in units:
                units[unit] = is_open

    def step(self, num_new: float, step_s: float) -> None:
        """`num_new` requests come, evenly over the step."""
        self.num_arrived += num_new
        self.prefill_queue += num_new
        num_units = sum(self.prefill_units.values())
        most = num_units * self.model.prefill_tokens_per_s * step_s / self.tokens_in_request
        num_done = min(self.prefill_queue, most)
        self.prefill_queue -= num_done
        self.num_prefilled += num_done
        self.decode_queue += num_done
        if self.decode_units:
            self._decode(step_s)

    def _decode(self, step_s: float) -> None:
        """One step of all decode units. Arrays are [units]."""
        held = np.array([self.held[unit] for unit in self.decode_units])
        is_open = np.array(list(self.decode_units.values()))
        num_ranks = self.model.decode_ranks
        guess = held
        for _ in range(3):  # tau is that of the step's mean batch, which is found by looking again.
            batch = np.minimum(0.5 * (held + guess) / num_ranks, self.model.batch_max)
            tau_s = self.tokens_out_request * self.model.tpot_s(batch)
            stay = np.exp(-step_s / tau_s)
            per_request = (
                tau_s / step_s * (1.0 - stay)
            )  # Of what flows in, so much is there at the end.
            room = (
                np.maximum(0.0, (self.model.batch_max * num_ranks - held * stay) / per_request)
                * is_open
            )
            inflow = _level(held * stay, per_request, room, self.decode_queue)
            guess = held * stay + inflow * per_request
        self.decode_queue = max(0.0, self.decode_queue - float(inflow.sum()))
        out = held + inflow - guess
        self.num_finished += float(out.sum())
        # N is the rate of leaving times tau: its integral over the step is what left, times tau.
        self.held_s += float((out * tau_s).sum())
        self.held.update(zip(self.decode_units, guess.tolist(), strict=True))


def _level(bottom: Floats, per_request: Floats, room: Floats, num_requests: float) -> Floats:
    """Pour requests into vessels so that they end up equally full (the front chooses the emptier
    unit each time).

    Args:
        bottom: [units] what is there already at the end of the step.
        per_request: [units] what of one that flows in is there at the end.
        room: [units] what flows in at most.

    Returns:
        [units] what flows in; the sum is `num_requests`, or all the room if that is less.
    """
    if num_requests >= room.sum():
        return room
    # What is poured rises with the level in straight pieces: a vessel begins to take at its bottom
    # and ends when full.
    levels = np.concatenate([bottom, bottom + room * per_request])
    order = np.argsort(levels)
    slopes = np.cumsum(np.concatenate([1.0 / per_request, -1.0 / per_request])[order])
    levels = levels[order]
    poured = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(levels))])
    level = float(np.interp(num_requests, poured, levels))
    inflow = np.clip((level - bottom) / per_request, 0.0, room)
    total = float(inflow.sum())
    return inflow * (num_requests / total) if total > 0.0 else inflow


# What the fluid day brought, hour by hour: sums of every step, nothing sampled.


@dataclass(frozen=True, slots=True)
class Hour:
    """One hour of the run."""

    hour: int
    """Hour of the day, 0 to 23."""
    nodes_mean: float
    nodes_peak: int
    prefill_nodes_mean: float
    decode_nodes_mean: float
    tokens_in: float
    """Prompt tokens of the requests that came."""
    tokens_prefilled: float
    tokens_out: float
    prefill_use: float
    """What the prefill units that were up did over what they could do."""
    batch_mean: float
    """Requests of a decode rank that was up."""
    tokens_per_s_user: float
    """While a request is in decode."""
    wait_s_max: float
    """How long the longest queue would take the units that were up then, prefill's and decode's
    together.
    """


@dataclass(frozen=True, slots=True)
class Day:
    """A run, by the hour and in sum."""

    hours: tuple[Hour, ...]
    node_hours: float
    nodes_peak: int
    nodes_min: int
    num_changes: int
    """How often the number of units that were wanted changed."""
    nodes_by_step: tuple[int, ...] = field(repr=False, default=())

    @property
    def nodes_mean(self) -> float:
        return sum(self.nodes_by_step) / len(self.nodes_by_step)

    @property
    def prefill_nodes_mean(self) -> float:
        return sum(hour.prefill_nodes_mean for hour in self.hours) / len(self.hours)

    @property
    def decode_nodes_mean(self) -> float:
        return sum(hour.decode_nodes_mean for hour in self.hours) / len(self.hours)

    @property
    def tokens_in(self) -> float:
        return sum(hour.tokens_in for hour in self.hours)

    @property
    def tokens_out(self) -> float:
        return sum(hour.tokens_out for hour in self.hours)

    @property
    def tokens_per_s_user(self) -> float:
        """Mean over output tokens: tokens over the seconds that requests were in decode."""
        held_s = sum(
            hour.tokens_out / hour.tokens_per_s_user
            for hour in self.hours
            if hour.tokens_per_s_user
        )
        return self.tokens_out / held_s if held_s else 0.0

    @property
    def wait_s_max(self) -> float:
        return max(hour.wait_s_max for hour in self.hours)


class _FluidStep(NamedTuple):
    """What one step added."""

    hour: int
    step_s: float
    prefill_nodes: int
    decode_nodes: int
    num_arrived: float
    num_prefilled: float
    num_finished: float
    held_s: float
    prefill_unit_s: float
    decode_unit_s: float
    wait_s: float


class Hours:
    """Watches an engine and its fleet, step after step."""

    def __init__(self, engine: Engine, fleet: Fleet) -> None:
        self._engine = engine
        self._fleet = fleet
        self._steps: list[_FluidStep] = []
        self._before = self._counters()
        self._num_changes = 0
        self._wanted = fleet.wanted

    def add(self, now_s: float, step_s: float) -> None:
        """A step of `step_s` has just ended."""
        engine, before = self._engine, self._before
        self._before = now = self._counters()
        num_arrived, num_prefilled, num_finished, held_s = (
            b - a for a, b in zip(before, now, strict=True)
        )
        prefill_s, decode_s = len(engine.prefill_units) * step_s, len(engine.decode_units) * step_s
        could_prefill = (
            max(prefill_s, step_s) * engine.model.prefill_tokens_per_s / engine.tokens_in_request
        )
        wait_s = engine.prefill_queue / could_prefill + engine.decode_queue / max(num_finished, 1.0)
        nodes = self._fleet.role_to_nodes()
        self._steps.append(
            _FluidStep(
                int((now_s - 0.5 * step_s) % DAY_S // HOUR_S),
                step_s,
                nodes[PREFILL],
                nodes[DECODE],
                num_arrived,
                num_prefilled,
                num_finished,
                held_s,
                prefill_s,
                decode_s,
                wait_s * step_s,
            )
        )
        self._num_changes += self._fleet.wanted != self._wanted
        self._wanted = self._fleet.wanted

    def done(self) -> Day:
        """The run so far. Raises ValueError for one without a step."""
        if not self._steps:
            raise ValueError("nothing ran: a day needs one step at least.")
        hours = tuple(
            self._hour(hour, list(steps))
            for hour, steps in groupby(self._steps, key=lambda step: step.hour)
        )
        nodes = tuple(step.prefill_nodes + step.decode_nodes for step in self._steps)
        node_s = sum(num * step.step_s for num, step in zip(nodes, self._steps, strict=True))
        return Day(hours, node_s / HOUR_S, max(nodes), min(nodes), self._num_changes, nodes)

    def _counters(self) -> tuple[float, float, float, float]:
        engine = self._engine
        return engine.num_arrived, engine.num_prefilled, engine.num_finished, engine.held_s

    def _hour(self, hour: int, steps: list[_FluidStep]) -> Hour:
        engine, total = (
            self._engine,
            _FluidStep(*(sum(column) for column in zip(*steps, strict=True))),
        )
        prefill_nodes = sum(step.prefill_nodes * step.step_s for step in steps) / total.step_s
        decode_nodes = sum(step.decode_nodes * step.step_s for step in steps) / total.step_s
        tokens_prefilled = total.num_prefilled * engine.tokens_in_request
        tokens_out = total.num_finished * engine.tokens_out_request
        can_prefill = total.prefill_unit_s * engine.model.prefill_tokens_per_s
        return Hour(
            hour,
            prefill_nodes + decode_nodes,
            max(step.prefill_nodes + step.decode_nodes for step in steps),
            prefill_nodes,
            decode_nodes,
            total.num_arrived * engine.tokens_in_request,
            tokens_prefilled,
            tokens_out,
            tokens_prefilled / can_prefill if can_prefill else 0.0,
            total.held_s / (total.decode_unit_s * engine.model.decode_ranks)
            if total.decode_unit_s
            else 0.0,
            tokens_out / total.held_s if total.held_s else 0.0,
            max(step.wait_s for step in steps),
        )


@dataclass(frozen=True)
class Faults:
    """What may go wrong, and how long things take."""

    start_s: float = 600.0
    """Time from the fleet's decision until a unit works: nodes are freed by other work, weights are
    read.
    """
    start_spread: float = 0.1
    """Spread of that time: uniform, plus or minus this share."""
    start_fail_share: float = 0.0
    """Share of starts that fail; they are known to have failed when they should have been done."""
    stop_s: float = 30.0
    node_failures_per_s: float = 0.0
    """Failures of one node a second; its unit dies with it."""
    noise: float = 0.02
    """Standard deviation of a step's arrivals beside the curve, as a share."""


class FluidDay:
    """One run. `start` is a time by the clock of the day, and so is everything the fleet
    hears.
    """

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
        """Events on their way to the fleet; the number breaks ties."""
        self._num_events = 0
        self._drains: dict[str, tuple[float, int]] = {}
        """Deadline and number of each unit's drain, as a front would keep them."""
        self._ending: set[str] = set()
        """Units whose end is on its way: ended again, they end no sooner and no later."""
        self._apply(fleet.start(start))

    def run(self, num_steps: int) -> Day:
        """Go on for so many steps and return what they brought, by the hour."""
        hours = Hours(self.engine, self.fleet)
        for _ in range(num_steps):
            self.step()
            hours.add(self.now_s, self._step_s)
        return hours.done()

    def run_day(self) -> Day:
        """Go on for a day."""
        return self.run(round(DAY_S / self._step_s))

    def step(self) -> None:
        """One step of the fluid, then what came due, then what a front would report."""
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

    # ---- what happens to units ----
    def _happens(self, event: Event) -> None:
        if isinstance(event, UnitUp):
            self.engine.up(event.unit, is_decode=event.role == DECODE)
        elif isinstance(event, UnitDown):
            self._ending.discard(event.unit)
            self._drains.pop(event.unit, None)
            self.engine.down(event.unit)
        self._tell(event)

    def _kill(self) -> None:
        """Every node may fail in every step, and takes its unit with it."""
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
                    pass  # Nodes that are offered and withdrawn are other work's.

    def _stop(self, unit: str) -> None:
        """A unit's process ends in a while; a start that was under way is given up."""
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

    # ---- what the fleet hears ----
    def _tell(self, event: Event) -> None:
        self._apply(self.fleet.handle(self.now_s, event))
        problems = self.fleet.check()
        if problems:
            raise InvariantError(f"after {type(event).__name__} at {self.now_s:g} s: {problems}")

    def _report(self) -> Demand:
        """Report the demand as roles/front/front would. Less than one request is none: a fluid
        never quite runs out.
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

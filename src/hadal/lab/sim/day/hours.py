"""Results of the fluid day by hour: sums over all steps, not samples. Reads engine and fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from hadal.core.config import DECODE, PREFILL
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.day.vessels import Engine
from hadal.policy.demand import DAY_S
from hadal.roles.fleet.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Hour:
    """One hour of the run."""

    hour: int
    """Hour of the day since midnight, 0 to 23."""
    nodes_mean: float
    nodes_peak: int
    prefill_nodes_mean: float
    decode_nodes_mean: float
    tokens_in: float
    """Prompt tokens of the requests that arrived."""
    tokens_prefilled: float
    tokens_out: float
    prefill_use: float
    """Tokens prefilled over the capacity of the prefill units that were up."""
    batch_mean: float
    """Mean number of requests per decode rank that was up."""
    tokens_per_s_user: float
    """Output tokens/s of a request while it is in decode."""
    wait_s_max: float
    """Longest time, over the hour's steps, to work off both queues at the speed of that step."""


@dataclass(frozen=True, slots=True)
class Day:
    """Results of a run, by hour and in total."""

    hours: tuple[Hour, ...]
    node_hours: float
    nodes_peak: int
    nodes_min: int
    num_changes: int
    """Number of changes of the fleet's wanted units."""
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
        """Output tokens over the seconds that requests were in decode."""
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
    """Increments of one step."""

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
    """Recorder of an engine and its fleet, step by step."""

    def __init__(self, engine: Engine, fleet: Fleet) -> None:
        self._engine = engine
        self._fleet = fleet
        self._steps: list[_FluidStep] = []
        self._before = self._counters()
        self._num_changes = 0
        self._wanted = fleet.need.units

    def add(self, now_s: float, step_s: float) -> None:
        """Record a step of `step_s` that has just ended."""
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
        self._num_changes += self._fleet.need.units != self._wanted
        self._wanted = self._fleet.need.units

    def done(self) -> Day:
        """Return the results so far. Raises ValueError before the first step."""
        if not self._steps:
            raise ValueError("no step ran; a day needs at least one.")
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

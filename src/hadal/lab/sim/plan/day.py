"""Units and GPU-hours that a role needs over a day: an estimate of the fleet's policy without
running it.

    units(t) = whole units for the largest need between t - hold and t + start-up + hold, at least 1

policy/scaling stops a unit by this rule but starts one later, so the estimate is slightly high.
`fluid_day` runs the fleet role itself. Does not depend on prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.lab.sim.day.fluid import Faults, FluidDay
from hadal.lab.sim.day.hours import Day
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.day.vessels import UnitModel
from hadal.lab.sim.plan.traffic import Traffic
from hadal.policy.demand import DAY_S, DayShape
from hadal.policy.scaling import RoleRules, ScalingRules
from hadal.roles.fleet.fleet import Fleet

STEP_S = 300.0
_EPSILON = 1e-9
_WARM_STEPS = 360
"""Minutes simulated before the day: the run starts without units, so a queue builds up first."""


@dataclass(frozen=True, slots=True)
class DayRules:
    """Rules for starting and stopping units. `is_static`: the peak's units all day."""

    is_static: bool = False
    start_s: float = 600.0
    """Seconds from the decision until a unit is ready: other work frees nodes, weights are read."""
    hold_s: float = 1800.0
    """A unit is stopped if it was not needed for this long and will not be for as long, seconds."""

    def level(self, shape: DayShape) -> Floats:
        """Return the load that running units can serve, over the day's mean [steps of a day]."""
        times = np.arange(0.0, DAY_S, STEP_S)
        rates = shape.at(times)
        if self.is_static:
            return np.full(len(times), rates.max())
        back, ahead = int(self.hold_s // STEP_S), int(-(-(self.start_s + self.hold_s) // STEP_S))
        return np.asarray(
            np.max([np.roll(rates, shift) for shift in range(-ahead, back + 1)], axis=0)
        )


@dataclass(frozen=True)
class Needs:
    """Needs of one role's candidate units over a day, arrays [candidates]."""

    peak: Floats
    """Units at the peak, not rounded."""
    num_peak: Ints
    """Units at the peak."""
    num_least: Ints
    """Minimum number of units over the day."""
    gpu_hours: Floats
    """GPU-hours of the day."""


def needs_of(mean: Floats, num_ranks: Ints, level: Floats) -> Needs:
    """Return the needs of candidates. `mean`: units at the day's mean rate, not rounded
    [candidates]; `level`: from DayRules.level.
    """
    units = np.maximum(1, np.ceil(mean[:, None] * level[None, :] - _EPSILON)).astype(np.int64)
    hours = units.mean(axis=1) * num_ranks * DAY_S / HOUR_S
    return Needs(mean * level.max(), units.max(axis=1), units.min(axis=1), hours)


def bundled_hours(
    means: Sequence[float], num_ranks: Sequence[int], sizes: Sequence[int], level: Floats
) -> float:
    """Return the GPU-hours of a day if roles scale together in bundles. `means`, `num_ranks` and
    `sizes` (units per bundle) are by role.
    """
    each = [
        np.ceil(mean * level / size - _EPSILON) for mean, size in zip(means, sizes, strict=True)
    ]
    bundles = np.maximum(1, np.max(each, axis=0))
    per_bundle = sum(ranks * size for ranks, size in zip(num_ranks, sizes, strict=True))
    return float(bundles.mean()) * per_bundle * DAY_S / HOUR_S


def fluid_day(
    traffic: Traffic,
    rules: DayRules,
    model: UnitModel,
    prefill: RoleRules,
    decode: RoleRules,
    decode_tokens_per_s: float,
    rng: np.random.Generator,
) -> Day:
    """Run the traffic's day as a fluid under the real fleet role."""
    nodes = prefill.num_max * prefill.unit_nodes + decode.num_max * decode.unit_nodes
    scaling = ScalingRules(prefill, decode, nodes, start_s=rules.start_s, hold_s=rules.hold_s)
    fleet = Fleet(
        scaling,
        prefill_tokens_per_s=model.prefill_tokens_per_s,
        decode_tokens_per_s=decode_tokens_per_s,
        shape=traffic.shape,
    )
    fluid = FluidDay(
        fleet, traffic.curve(), model, Faults(start_s=rules.start_s), rng, start=-60.0 * _WARM_STEPS
    )
    fluid.run(_WARM_STEPS)
    return fluid.run_day()

"""How many units of a role a day takes, and their GPU-hours: what the fleet's policy comes to,
without running it.

    units(t) = whole units for the most that is needed between t - hold and t + start-up + hold, 1
    at least

which is when policy/scaling gives a unit up; it starts one later than that, so this is a little
more. `fluid_day` runs the role itself. Knows no prices.
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
"""Minutes before the fluid day: it begins with nothing and a queue."""


@dataclass(frozen=True, slots=True)
class DayRules:
    """How units come and go. `is_static`: as many as the peak needs, all day."""

    is_static: bool = False
    start_s: float = 600.0
    """Time until a unit works: nodes are freed by other work, weights are read."""
    hold_s: float = 1800.0

    def level(self, shape: DayShape) -> Floats:
        """What units are kept for, over the day's mean, [steps of a day]."""
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
    """What one role's candidates need, [candidates]: units at the peak, the least over the day, and
    GPU-hours of it.
    """

    peak: Floats
    """Not rounded."""
    num_peak: Ints
    num_least: Ints
    gpu_hours: Floats


def needs_of(mean: Floats, num_ranks: Ints, level: Floats) -> Needs:
    """`mean`: units needed at the day's mean rate, not rounded [candidates]; `level` as DayRules
    says.
    """
    units = np.maximum(1, np.ceil(mean[:, None] * level[None, :] - _EPSILON)).astype(np.int64)
    hours = units.mean(axis=1) * num_ranks * DAY_S / HOUR_S
    return Needs(mean * level.max(), units.max(axis=1), units.min(axis=1), hours)


def bundled_hours(
    means: Sequence[float], num_ranks: Sequence[int], sizes: Sequence[int], level: Floats
) -> float:
    """GPU-hours if roles grow together: `means`, `num_ranks` and units of a bundle, `sizes`, by
    role.
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
    """The traffic's day under the real fleet role, as a fluid."""
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

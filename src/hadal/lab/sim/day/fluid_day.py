"""Day of a study as a fluid: number of nodes at every minute, under the server's own fleet role.

The run begins EARLY_HOURS before the day with an empty fleet, so the ramp-up is not part of the
day. Times are Beijing's clock, as the fleet sees it; hours are counted from second 0, noon, as in
all of lab/sim/day. Single requests are not simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hadal.core.arrays import Ints
from hadal.core.config import DECODE, PREFILL
from hadal.core.errors import ConfigError
from hadal.lab.sim.day.curves import UnitCurves
from hadal.lab.sim.day.demand import DayDemand, generator
from hadal.lab.sim.day.fluid import Faults, FluidDay
from hadal.lab.sim.day.hours import Day, Hours
from hadal.lab.sim.day.published import FIRST_HOUR, HOUR_S
from hadal.lab.sim.day.study import Study
from hadal.policy.demand import DAY_S
from hadal.policy.scaling import Units
from hadal.roles.fleet.fleet import Fleet

EARLY_HOURS = 6
STEP_S = 60.0


@dataclass(frozen=True)
class Middle:
    """State of the fleet at one moment."""

    units: Units
    """Units that accept new requests."""
    requests_per_rank: float
    """Mean number of requests per decode rank."""
    tokens_per_s_user: float
    prefill_use: float
    """Prompt tokens/s that arrive, as a share of the tokens/s that prefill units can process."""


@dataclass(frozen=True)
class FluidResult:
    """Result of a day of 1,440 minutes from noon in Beijing."""

    day: Day
    prefill_nodes: Ints
    """Prefill nodes owned by minute, including those of units that start or drain."""
    decode_nodes: Ints
    """Decode nodes owned by minute, including those of units that start or drain."""
    middles: tuple[Middle, ...]
    """State of the fleet in the middle of each hour."""
    capacity: tuple[float, float]
    """Tokens/s of a (prefill, decode) unit within the SLO, as the fleet role counts on them."""


def fluid_day(study: Study, curves: UnitCurves, load: DayDemand) -> FluidResult:
    """Run the day. Raises ConfigError if no decode batch meets the TPOT target."""
    try:
        decode_tokens_per_s = curves.decode_tokens_per_s(study.tpot_ms / 1e3)
    except ValueError as error:
        raise ConfigError(f"{study.name}: {error}") from error
    demand, fleet_study = load.demand(), study.fleet
    fleet = Fleet(
        study.rules(),
        prefill_tokens_per_s=curves.prefill_tokens_per_s,
        decode_tokens_per_s=decode_tokens_per_s,
        shape=demand.shape,
    )
    faults = Faults(
        fleet_study.start_s,
        fleet_study.start_spread,
        fleet_study.start_fail_share,
        node_failures_per_s=1.0 / (3600.0 * fleet_study.hours_between_failures)
        if fleet_study.hours_between_failures
        else 0.0,
        noise=fleet_study.noise,
    )
    fluid = FluidDay(
        fleet,
        demand,
        curves.unit_model(),
        faults,
        generator(study, "fluid"),
        start=HOUR_S * (FIRST_HOUR - EARLY_HOURS),
        step_s=STEP_S,
    )
    fluid.run(round(EARLY_HOURS * HOUR_S / STEP_S))
    hours = Hours(fluid.engine, fleet)
    nodes: list[tuple[int, int]] = []
    middles = []
    for minute in range(round(DAY_S / STEP_S)):
        fluid.step()
        hours.add(fluid.now_s, STEP_S)
        owned = fleet.role_to_nodes()
        nodes.append((owned[PREFILL], owned[DECODE]))
        if minute % 60 == 29:  # Minute 29 has just ended, so it is half past.
            middles.append(_middle(fluid, demand.requests_per_s(fluid.now_s)))
    prefill_nodes, decode_nodes = np.array(nodes, np.int64).T
    return FluidResult(
        hours.done(),
        prefill_nodes,
        decode_nodes,
        tuple(middles),
        (curves.prefill_tokens_per_s, decode_tokens_per_s),
    )


def _middle(fluid: FluidDay, requests_per_s: float) -> Middle:
    engine, model = fluid.engine, fluid.engine.model
    units = Units(sum(engine.prefill_units.values()), sum(engine.decode_units.values()))
    batch = sum(engine.held.values()) / max(1, len(engine.held)) / model.decode_ranks
    could = max(1, units.prefill) * model.prefill_tokens_per_s
    return Middle(
        units,
        batch,
        1.0 / float(model.tpot_s(np.array(batch))),
        requests_per_s * engine.tokens_in_request / could,
    )

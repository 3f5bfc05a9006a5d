"""Cheapest deployment within a latency SLO: all pairs of units, priced over a day of the traffic.

    units of each role within the SLO (lab/sim/plan/units)
        ->  their number over the day (lab/sim/plan/day)  ->  dollars per day

Both roles run on one kind of hardware. Roles scale on their own, so the cost of a pair is the sum
of its parts, and all pairs of a hardware are one outer sum. Does not depend on files;
lab/sim/plan/search runs the simulations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hadal.core.arrays import Floats
from hadal.lab.perf.hardware import Hardware
from hadal.lab.perf.rent import Rent
from hadal.lab.perf.roofline import FP8
from hadal.lab.sim.plan.day import DayRules, needs_of
from hadal.lab.sim.plan.traffic import Traffic
from hadal.lab.sim.plan.units import SPARE_SIGMAS, DecodeUnit, PrefillUnit, Pricing, Rejected
from hadal.policy.capacity import USE_MAX, units_needed
from hadal.policy.slo import Slo

_Unit = TypeVar("_Unit", PrefillUnit, DecodeUnit)


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search, besides widths, redundancy, batches and sizes of steps."""

    mtp_tokens: tuple[int, ...] = (0,)
    """Candidates for the speculative tokens per request and step."""
    dtypes: tuple[str, ...] = (FP8,)
    """Candidates for the data type of routed experts' weights."""
    rules: DayRules = field(default_factory=DayRules)


@dataclass(frozen=True)
class RolePlan:
    """Number of units of one role over the day."""

    unit_tokens_per_s: float
    """Tokens/s of a unit: prompt tokens with cached ones, or output tokens."""
    use: float
    """Highest mean utilization of a unit."""
    need_mean: float
    """Units at the day's mean rate, not rounded."""
    need_peak: float
    """Units at the peak, not rounded."""
    num_peak: int
    """Maximum number of units of the day."""
    num_least: int
    """Minimum number of units of the day."""
    gpu_hours: float
    """GPU-hours of a day."""
    num_ranks: int
    gpus_per_node: int

    @property
    def unit_nodes(self) -> float:
        """Nodes of a unit; below 1 if it is smaller than a node."""
        return self.num_ranks / self.gpus_per_node

    @property
    def rounded_share(self) -> float:
        """GPU-hours divided by those of a fleet that follows the demand exactly. Above 1, because
        units are whole and are kept for some time after a peak.
        """
        return self.gpu_hours / (24.0 * self.need_mean * self.num_ranks)


@dataclass(frozen=True)
class DeploymentPlan:
    """One deployment, and its cost per day."""

    hardware: Hardware
    rent: Rent
    traffic: Traffic = field(repr=False)
    slo: Slo
    prefill_unit: PrefillUnit
    decode_unit: DecodeUnit
    prefill: RolePlan
    decode: RolePlan
    rules: DayRules
    mtp_accept: float

    @property
    def gpu_hours(self) -> float:
        return self.prefill.gpu_hours + self.decode.gpu_hours

    @property
    def cost_usd(self) -> float:
        """Cost of a day."""
        return self.rent.usd * self.gpu_hours

    @property
    def nodes_mean(self) -> float:
        return self.gpu_hours / 24.0 / self.hardware.gpus_per_node

    @property
    def nodes_peak(self) -> float:
        """Nodes if both roles reach their maximum number of units at the same time."""
        return (
            self.prefill.num_peak * self.prefill.unit_nodes
            + self.decode.num_peak * self.decode.unit_nodes
        )

    @property
    def usd_per_million_out(self) -> float:
        """Cost per million output tokens, including prefill's cost."""
        return (
            self.cost_usd / (self.traffic.requests_per_s * self.traffic.tokens_out * 86_400.0) * 1e6
        )

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """Properties outside the range that the step model was fitted to."""
        return tuple(
            dict.fromkeys(
                (*self.prefill_unit.price.extrapolated, *self.decode_unit.price.extrapolated)
            )
        )

    def __str__(self) -> str:
        return f"{self.hardware.name}: prefill {self.prefill_unit}; decode {self.decode_unit}"


@dataclass(frozen=True)
class HardwarePlans:
    """All pairs of units on one hardware. Costs: [prefill units, decode units], dollars per day."""

    pricing: Pricing
    rent: Rent
    choice: SearchOptions
    prefill: tuple[PrefillUnit, ...]
    decode: tuple[DecodeUnit, ...]
    prefill_plans: tuple[RolePlan, ...]
    decode_plans: tuple[RolePlan, ...]
    rejected: tuple[Rejected, ...]
    num_tried: int
    """Number of pairs, including pairs with a rejected unit."""

    @property
    def cost_PD(self) -> Floats:
        hours = [
            np.array([plan.gpu_hours for plan in plans])
            for plans in (self.prefill_plans, self.decode_plans)
        ]
        return np.asarray(self.rent.usd * (hours[0][:, None] + hours[1][None, :]))

    def pair(self, prefill: int, decode: int) -> DeploymentPlan:
        """Return the plan of the pair at these indices."""
        pricing = self.pricing
        return DeploymentPlan(
            pricing.hardware,
            self.rent,
            pricing.traffic,
            pricing.slo,
            self.prefill[prefill],
            self.decode[decode],
            self.prefill_plans[prefill],
            self.decode_plans[decode],
            self.choice.rules,
            pricing.mtp_accept,
        )

    def ranked(self) -> list[DeploymentPlan]:
        """Return the cheapest pair per prefill width and decode width, cheapest first. Ties go to
        the earlier candidate, which is smaller.
        """
        found: dict[tuple[int, int], DeploymentPlan] = {}
        costs = self.cost_PD
        for flat in np.argsort(costs, axis=None, kind="stable"):
            prefill, decode = divmod(int(flat), costs.shape[1])
            key = self.prefill[prefill].model.num_ranks, self.decode[decode].model.num_ranks
            if key not in found:
                found[key] = self.pair(prefill, decode)
        return list(found.values())


def price_hardware(pricing: Pricing, rent: Rent, choice: SearchOptions) -> HardwarePlans:
    """Price all pairs of a prefill and a decode unit on one hardware."""
    prefill, no_prefill = _sorted(pricing.prefill_units(choice.dtypes))
    decode, no_decode = _sorted(
        unit for drafts in choice.mtp_tokens for unit in pricing.decode_units(drafts, choice.dtypes)
    )
    num_tried = (len(prefill) + len(no_prefill)) * (len(decode) + len(no_decode))
    return HardwarePlans(
        pricing,
        rent,
        choice,
        tuple(prefill),
        tuple(decode),
        tuple(role_plans(pricing, prefill, choice.rules)),
        tuple(role_plans(pricing, decode, choice.rules)),
        (*no_prefill, *no_decode),
        num_tried,
    )


def role_plans(
    pricing: Pricing, units: Sequence[PrefillUnit | DecodeUnit], rules: DayRules
) -> list[RolePlan]:
    """Return the plan of a role for each unit, as if all units of the role were of this kind."""
    if not units:
        return []
    traffic = pricing.traffic
    uses = [use_of(unit, traffic) for unit in units]
    means = [
        units_needed(_tokens_per_s(unit, traffic), unit.tokens_per_s, use)
        for unit, use in zip(units, uses, strict=True)
    ]
    ranks = np.array([unit.model.num_ranks for unit in units])
    needs = needs_of(np.array(means), ranks, rules.level(traffic.shape))
    return [
        RolePlan(
            unit.tokens_per_s,
            uses[i],
            means[i],
            float(needs.peak[i]),
            int(needs.num_peak[i]),
            int(needs.num_least[i]),
            float(needs.gpu_hours[i]),
            unit.model.num_ranks,
            pricing.hardware.gpus_per_node,
        )
        for i, unit in enumerate(units)
    ]


def use_of(unit: PrefillUnit | DecodeUnit, traffic: Traffic) -> float:
    """Return the highest mean utilization at the peak that leaves capacity for uneven arrivals.

    With N concurrent requests (Little's law), N + 2 sqrt(N) must fit: their number is Poisson, and
    in prefill the work per request varies as well.
    """
    per_s = traffic.requests_per_s * traffic.peak
    if isinstance(unit, DecodeUnit):
        return _with_room(per_s * traffic.tokens_out * unit.tpot_s, 0.0)
    return min(USE_MAX, unit.use * _with_room(per_s * unit.ttft_s, traffic.variation_in))


def _with_room(num_requests: float, variation: float) -> float:
    return 1.0 / (1.0 + SPARE_SIGMAS * math.sqrt((1.0 + variation**2) / num_requests))


def _tokens_per_s(unit: PrefillUnit | DecodeUnit, traffic: Traffic) -> float:
    return traffic.requests_per_s * (
        traffic.tokens_out if isinstance(unit, DecodeUnit) else traffic.tokens_in
    )


def _sorted(found: Iterable[_Unit | Rejected]) -> tuple[list[_Unit], list[Rejected]]:
    units: list[_Unit] = []
    rejected: list[Rejected] = []
    for one in found:
        if isinstance(one, Rejected):
            rejected.append(one)
        else:
            units.append(one)
    return units, rejected

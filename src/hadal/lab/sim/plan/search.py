"""Search for the cheapest plan: price all hardware, simulate the best plans, and re-plan if one
misses its SLO.

price all  ->  cheapest  ->  simulate  -- meets the SLO -->  a plan
                  ^             | misses it by r: lower the role's share of the SLO on this hardware
                  |_____________|
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from numpy.random import Generator

from hadal.lab.sim.plan.measure import Measured, measure
from hadal.lab.sim.plan.plan import DeploymentPlan, HardwarePlans, price_hardware

TRIES = 4
"""Maximum number of simulated plans of a search, per plan to verify."""
NODES_MAX = 10_000
"""Maximum number of nodes at the peak. More is usually a mistake in a file; larger traffic can be
planned in equal parts, because costs add up.
"""
_SAFETY = 0.98
"""Factor on a corrected share of the SLO, so that a re-plan does not miss it narrowly again."""
_SHARE_MIN = 0.3
"""Smallest factor, before _SAFETY, by which one simulation lowers a share of the SLO."""


@dataclass(frozen=True)
class Rejection:
    """Plan that missed its SLO in the simulator."""

    plan: DeploymentPlan
    measured: Measured
    why: str


@dataclass
class Search:
    """Priced pairs of each hardware, and the simulations so far."""

    found: list[HardwarePlans]
    verified: list[tuple[DeploymentPlan, Measured]] = field(default_factory=list)
    """Plans that met their SLO in the simulator, cheapest first."""
    refuted: list[Rejection] = field(default_factory=list)

    def ranked(self) -> list[DeploymentPlan]:
        """Return the cheapest pair per hardware, prefill width and decode width, cheapest first."""
        return sorted(
            (plan for found in self.found for plan in found.ranked()),
            key=lambda plan: plan.cost_usd,
        )

    def of(self, plan: DeploymentPlan) -> HardwarePlans:
        """Return the pairs of this plan's hardware."""
        return next(found for found in self.found if found.pricing.hardware == plan.hardware)

    def is_verified(self, plan: DeploymentPlan) -> bool:
        return any(_key(plan) == _key(other) for other, _ in self.verified)

    def verify(
        self, num: int, rng: Generator, progress: Callable[[DeploymentPlan, float], None]
    ) -> None:
        """Simulate plans until the `num` cheapest all meet their SLO.

        A plan that misses it lowers the share of the SLO that its hardware is priced for, and so
        changes the order. After TRIES x `num` simulations `verified` may hold fewer plans.
        """
        seen: dict[tuple[object, ...], Measured] = {}
        for _ in range(TRIES * num):
            self.verified = [
                (plan, seen[_key(plan)]) for plan in self.ranked()[:num] if _key(plan) in seen
            ]
            plan = next((plan for plan in self.ranked()[:num] if _key(plan) not in seen), None)
            if plan is None:
                return
            measured = measure(plan, rng, lambda share, plan=plan: progress(plan, share))  # type: ignore[misc]
            problem = measured.problem(plan)
            if not problem:
                seen[_key(plan)] = measured
                continue
            self.refuted.append(Rejection(plan, measured, problem))
            self._believe_less(plan, measured)
        self.verified = [
            (plan, seen[_key(plan)]) for plan in self.ranked()[:num] if _key(plan) in seen
        ]

    def _believe_less(self, plan: DeploymentPlan, measured: Measured) -> None:
        found = self.of(plan)
        pricing, slo = found.pricing, plan.slo
        ttft, tpot = slo.ttft_s / measured.promised_ttft_s, slo.tpot_s / measured.promised_tpot_s
        if measured.num_failed and min(ttft, tpot) > 1.0:
            ttft = tpot = 0.9
        changed = replace(
            pricing,
            prefill_share=pricing.prefill_share
            * (max(_SHARE_MIN, ttft) * _SAFETY if ttft < 1.0 else 1.0),
            decode_share=pricing.decode_share
            * (max(_SHARE_MIN, tpot) * _SAFETY if tpot < 1.0 else 1.0),
        )
        self.found[self.found.index(found)] = price_hardware(changed, found.rent, found.choice)


def too_large(plan: DeploymentPlan) -> str:
    """Return an error text if a plan needs more than NODES_MAX nodes; else ""."""
    if plan.nodes_peak <= NODES_MAX:
        return ""
    return (
        f"{plan} needs {plan.nodes_peak:,.0f} nodes at the peak, and the limit is"
        f" {NODES_MAX:,}: divide requests_per_s by"
        f" {math.ceil(plan.nodes_peak / NODES_MAX):,} and plan one of these equal parts."
    )


def impossible(found: Sequence[HardwarePlans]) -> str:
    """Return the reason why no hardware has a plan: the nearest units, role by role."""
    lines = []
    for one in found:
        for role, units in (("prefill", one.prefill), ("decode", one.decode)):
            if not units:
                rejected = [reject for reject in one.rejected if reject.role == role]
                if not rejected:
                    lines.append(f"{one.pricing.hardware.name} cannot run any {role} unit.")
                    continue
                nearest = min(rejected, key=lambda reject: reject.shortfall)
                lines.append(
                    f"{one.pricing.hardware.name} has no {role} unit that meets the SLO; the"
                    f" nearest is {nearest.what}: {nearest.why}."
                )
    return " ".join(lines)


def _key(plan: DeploymentPlan) -> tuple[object, ...]:
    """Return the identity of a plan: a re-plan with another batch or use is another plan."""
    prefill, decode = plan.prefill_unit, plan.decode_unit
    return str(plan), decode.batch, round(plan.prefill.use, 6), prefill.chunk_tokens

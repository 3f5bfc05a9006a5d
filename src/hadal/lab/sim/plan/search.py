"""The search as a whole: every hardware priced, the best simulated, and what missed its promise
planned anew.

price all  ->  cheapest  ->  simulate  -- keeps it -->  a plan
                  ^             | misses it by r: of this hardware, less is believed of that role
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
"""Plans of one search that are simulated for each that is to be verified, at most."""
NODES_MAX = 10_000
"""Most nodes at the peak: more is a mistake in a file, and a fleet of equal parts costs what its
parts cost.
"""
_SAFETY = 0.98
"""Share that is believed of what would just have kept the promise, so that a re-plan does not miss
it by a hair again.
"""
_SHARE_MIN = 0.3
"""A promise is never planned for with less than this of it."""


@dataclass(frozen=True)
class Rejection:
    """A plan that the simulator refuted."""

    plan: DeploymentPlan
    measured: Measured
    why: str


@dataclass
class Search:
    """The hardware's pairs and what was simulated of them."""

    found: list[HardwarePlans]
    verified: list[tuple[DeploymentPlan, Measured]] = field(default_factory=list)
    """Plans that kept their promise in the simulator, cheapest first."""
    refuted: list[Rejection] = field(default_factory=list)

    def ranked(self) -> list[DeploymentPlan]:
        """The cheapest pair of each two widths of each hardware, cheapest first."""
        return sorted(
            (plan for found in self.found for plan in found.ranked()),
            key=lambda plan: plan.cost_usd,
        )

    def of(self, plan: DeploymentPlan) -> HardwarePlans:
        """The pairs of this plan's hardware."""
        return next(found for found in self.found if found.pricing.hardware == plan.hardware)

    def is_verified(self, plan: DeploymentPlan) -> bool:
        return any(_key(plan) == _key(other) for other, _ in self.verified)

    def verify(
        self, num: int, rng: Generator, progress: Callable[[DeploymentPlan, float], None]
    ) -> None:
        """Simulate the cheapest plans until `num` of them, the very cheapest among them, keep their
        promise.

        What misses it changes what is believed of its hardware, and so the order. After TRIES x
        `num` it is left at what there is.
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
    """Why nobody plans for so many nodes; empty if one does."""
    if plan.nodes_peak <= NODES_MAX:
        return ""
    return (
        f"{plan} takes {plan.nodes_peak:,.0f} nodes at the peak, and at most {NODES_MAX:,} are"
        f" planned: plan one of {math.ceil(plan.nodes_peak / NODES_MAX):,} equal parts of the"
        " traffic, with so much less of requests_per_s."
    )


def impossible(found: Sequence[HardwarePlans]) -> str:
    """Why no plan came out of any hardware: what came nearest, role by role."""
    lines = []
    for one in found:
        for role, units in (("prefill", one.prefill), ("decode", one.decode)):
            if not units:
                rejected = [reject for reject in one.rejected if reject.role == role]
                if not rejected:
                    lines.append(f"{one.pricing.hardware.name} cannot have any {role} unit.")
                    continue
                nearest = min(rejected, key=lambda reject: reject.shortfall)
                lines.append(
                    f"{one.pricing.hardware.name} has no {role} unit for it; the nearest is"
                    f" {nearest.what}: {nearest.why}."
                )
    return " ".join(lines)


def _key(plan: DeploymentPlan) -> tuple[object, ...]:
    """What tells plans apart: a re-plan with another batch or use is another plan."""
    prefill, decode = plan.prefill_unit, plan.decode_unit
    return str(plan), decode.batch, round(plan.prefill.use, 6), prefill.chunk_tokens

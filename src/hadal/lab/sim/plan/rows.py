"""Alternatives to the best plan, each with its cost or rejection, and why. Simulates nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hadal.lab.perf.roofline import FP4, FP8
from hadal.lab.sim.plan.day import bundled_hours
from hadal.lab.sim.plan.plan import DeploymentPlan, HardwarePlans, SearchOptions, price_hardware
from hadal.lab.sim.plan.units import DecodeUnit, PrefillUnit, Rejected

_SMALL = 0.003
"""Smallest relative difference that is mentioned."""


@dataclass(frozen=True)
class Row:
    """One line of the table of alternatives."""

    dimension: str
    """Property in which the row differs from the best plan."""
    value: str
    """Value of the property `dimension`."""
    plan: DeploymentPlan | None
    """Alternative plan; None if there is no complete one."""
    cost_usd: float | None
    """Cost of a day; None if no unit with this value was possible."""
    why: str
    """Reason for a higher cost or a rejection; for options outside the search, their effect."""


def why(plan: DeploymentPlan, best: DeploymentPlan) -> str:
    """Return the reason why `plan` costs more than `best`, as a sentence without its full stop."""
    reasons = []
    if plan.hardware != best.hardware:
        if plan.rent.usd != best.rent.usd:
            reasons.append(f"${plan.rent.usd:g} instead of ${best.rent.usd:g} per GPU-hour")
        reasons.append(
            f"{plan.gpu_hours / 24:,.0f} GPUs on average instead of {best.gpu_hours / 24:,.0f}"
        )
    is_same = plan.hardware == best.hardware
    if not is_same or plan.decode_unit != best.decode_unit:
        reasons += _decode(plan.decode_unit, best.decode_unit)
    if not is_same or plan.prefill_unit != best.prefill_unit:
        reasons += _prefill(plan.prefill_unit, best.prefill_unit)
    if is_same:
        for name, role, other in (
            ("prefill", plan.prefill, best.prefill),
            ("decode", plan.decode, best.decode),
        ):
            if role.rounded_share / other.rounded_share > 1.0 + _SMALL:
                reasons.append(
                    f"{name} units of {role.num_ranks} GPUs waste"
                    f" {role.rounded_share - 1.0:.0%} by rounding up to whole units, units"
                    f" of {other.num_ranks} waste {other.rounded_share - 1.0:.0%}"
                )
    more = plan.cost_usd / best.cost_usd - 1.0
    if abs(more) < 5e-4 and not reasons:
        return "costs the same; the smaller one is chosen"
    return f"{more:+.1%}" + (f": {'; '.join(reasons)}" if reasons else "")


def _decode(unit: DecodeUnit, best: DecodeUnit) -> list[str]:
    ratio = unit.tokens_per_s_gpu / best.tokens_per_s_gpu
    if abs(ratio - 1.0) < _SMALL:
        return []
    limit = " (limited by memory)" if unit.is_memory_bound else ""
    return [
        f"decode {unit} runs {unit.batch} requests per GPU at {unit.tpot_s * 1e3:.0f}"
        f" ms{limit} instead of {best.batch}"
        + (
            f" at {best.tpot_s * 1e3:.0f} ms"
            if best.is_memory_bound or unit.is_memory_bound
            else ""
        )
    ]


def _prefill(unit: PrefillUnit, best: PrefillUnit) -> list[str]:
    if abs(unit.tokens_per_s_gpu / best.tokens_per_s_gpu - 1.0) < _SMALL:
        return []
    return [
        f"prefill {unit} computes {unit.tokens_per_s_gpu:,.0f} prompt tokens/s/GPU within"
        f" the TTFT instead of {best.tokens_per_s_gpu:,.0f}"
    ]


def dimension_rows(best: DeploymentPlan, found: HardwarePlans) -> Iterator[Row]:
    """Yield the next best value of each dimension of the best plan, then the rejected units."""
    prefill, decode = best.prefill_unit, best.decode_unit
    dimensions: tuple[tuple[str, Callable[[PrefillUnit, DecodeUnit], bool]], ...] = (
        ("decode width", lambda p, d: d.model.num_ranks != decode.model.num_ranks),
        (
            "decode redundancy",
            lambda p, d: (
                d.model.num_ranks == decode.model.num_ranks
                and d.model.num_redundant != decode.model.num_redundant
            ),
        ),
        ("prefill width", lambda p, d: p.model.num_ranks != prefill.model.num_ranks),
        (
            "prefill redundancy",
            lambda p, d: (
                p.model.num_ranks == prefill.model.num_ranks
                and p.model.num_redundant != prefill.model.num_redundant
            ),
        ),
        (
            "prefill step",
            lambda p, d: p.model == prefill.model and p.chunk_tokens != prefill.chunk_tokens,
        ),
    )
    costs = found.cost_PD
    for name, is_other in dimensions:
        fits = np.array([[is_other(p, d) for d in found.decode] for p in found.prefill])
        if fits.any():
            flat = int(np.argmin(np.where(fits, costs, np.inf)))
            plan = found.pair(*divmod(flat, costs.shape[1]))
            unit = plan.decode_unit if name.startswith("decode") else plan.prefill_unit
            yield Row(name, str(unit), plan, plan.cost_usd, why(plan, best))
    yield from rejected_rows(found.rejected)


def rejected_rows(rejected: Sequence[Rejected]) -> Iterator[Row]:
    """Yield one row per role and width with rejected units: the unit nearest to the SLO."""
    nearest: dict[tuple[str, int], Rejected] = {}
    for one in rejected:
        key = one.role, one.num_ranks
        if key not in nearest or one.shortfall < nearest[key].shortfall:
            nearest[key] = one
    for one in nearest.values():
        yield Row(f"{one.role} width", one.what, None, None, one.why)


def what_if_rows(best: DeploymentPlan, found: HardwarePlans) -> Iterator[Row]:
    """Yield the best plans for the same traffic with options outside the search: a static fleet,
    bundles, drafts (speculative tokens), FP4.
    """
    pricing, choice = found.pricing, found.choice

    def row(name: str, value: str, changed: SearchOptions, note: str) -> Iterator[Row]:
        plans = price_hardware(pricing, found.rent, changed).ranked()
        if plans:
            plan, text = plans[0], f"{plans[0].cost_usd / best.cost_usd - 1.0:+.1%} with {plans[0]}"
            yield Row(name, value, plan, plan.cost_usd, f"{text}; {note}" if note else text)

    if not choice.rules.is_static:
        static = replace(choice, rules=replace(choice.rules, is_static=True))
        yield from row("fleet", "the peak's units all day", static, "")
        yield _bundles(best)
    if 1 not in choice.mtp_tokens and pricing.model.num_nextn_predict_layers:
        yield from row(
            "MTP",
            "1 draft",
            replace(choice, mtp_tokens=(1,)),
            f"{pricing.mtp_accept:.0%} of drafts accepted; enable it with --mtp-tokens 1",
        )
    if FP4 not in choice.dtypes and pricing.hardware.fp4_flops:
        yield from row(
            "experts", "FP4", replace(choice, dtypes=(FP8, FP4)), "`hadal serve` cannot load it yet"
        )


def _bundles(best: DeploymentPlan) -> Row:
    roles = (best.prefill, best.decode)
    ratio = best.prefill.need_peak / best.decode.need_peak
    sizes = (max(1, round(ratio)), 1) if ratio >= 1.0 else (1, max(1, round(1.0 / ratio)))
    hours = bundled_hours(
        [role.need_mean for role in roles],
        [role.num_ranks for role in roles],
        sizes,
        best.rules.level(best.traffic.shape),
    )
    cost = best.rent.usd * hours
    text = (
        f"{cost / best.cost_usd - 1.0:+.1%}: both roles grow with the scarcer one, in"
        " steps of a whole bundle"
    )
    return Row("fleet", f"bundles of {sizes[0]} prefill + {sizes[1]} decode", None, cost, text)

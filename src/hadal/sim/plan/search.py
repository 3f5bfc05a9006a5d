"""The search as a whole: every hardware priced, the best simulated, and what missed its promise
planned anew.

price all  ->  cheapest  ->  simulate  -- keeps it -->  a plan
                  ^             | misses it by r: of this hardware, less is believed of that role
                  |_____________|
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.random import Generator

from hadal.core.balance import OFF
from hadal.core.config import DECODE, PREFILL, CacheConfig
from hadal.core.messages import BLOCK_TOKENS
from hadal.perf.roofline import FP4, FP8
from hadal.policy.capacity import MEAN
from hadal.policy.scaling import RoleRules
from hadal.sim.day.clock import Floats, Ints
from hadal.sim.day.vessels import UnitModel
from hadal.sim.plan.deploy import deployment_of
from hadal.sim.plan.plan import (
    DeploymentPlan,
    HardwarePlans,
    RolePlan,
    SearchOptions,
    bundled_hours,
    fluid_day,
    price_hardware,
)
from hadal.sim.plan.traffic import Traffic
from hadal.sim.plan.units import KV_UNEVEN, DecodeUnit, PrefillUnit, Rejected
from hadal.sim.world.seen import Requests, quantiles
from hadal.sim.world.world import FleetWorld

# A plan in the simulator: its units under the roles that serve, at the load of the busiest hour,
# beside its promise.
#
# A part of the fleet that has its proportions runs with its part of the peak's requests. It starts as
# if it had run for hours: requests are on the decode units with what such a moment has of ages and
# lengths. Generators are passed in.


SETTLE_S, MEASURE_S = 5.0, 8.0
"""Least seconds simulated before it is measured, and meanwhile."""
TTFTS_SETTLE, TTFTS_MEASURE = 4.0, 5.0
"""The same bounds, in times that are promised for the first token: the larger ones hold."""
RUNNING_MAX = 16_000
RANKS_MAX = 1024
"""Most ranks of the part of the fleet that is simulated; one unit of each role it is at least."""
SECONDS_MAX, REQUESTS_MAX = 600.0, 60_000
"""Simulated at most, and requests that come meanwhile or run at the start. Where a promise of
minutes would take longer it is looked at for less time; where more come in the least time, units
have less than their load, which is said.
"""
FLUID_UNITS_MAX = 400
"""Most units at the peak of the day that is run: it takes a second for a hundred units, and more
than in proportion.
"""
CONTEXT_MAX = 131_072
LOAD_MIN = 0.95
"""Least share of its planned load that tries a role at what it promises; less is said."""
UNEVEN_MAX = 0.04
"""How far apart the roles' loads may be in the part that is simulated, if there is such a part."""
_STEPS = 20
"""Steps of progress."""


@dataclass(frozen=True)
class Latency:
    """Seconds over requests, or over tokens."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Measured:
    """What the simulator saw of a plan."""

    num_prefill: int
    num_decode: int
    requests_per_s: float
    prefill_load: float
    """Share of what these units are planned to take at the peak; less where whole units do not have
    the proportions.
    """
    decode_load: float
    seconds: float
    num_requests: int
    """Requests with a first token in that time."""
    num_failed: int
    ttft_s: Latency
    tpot_s: Latency
    """Time from token to token, over tokens."""
    promised_ttft_s: float
    """What was promised of, as it was measured."""
    promised_tpot_s: float
    requests_per_rank: float
    kv_length: float

    def problem(self, plan: DeploymentPlan) -> str:
        """Why it misses the promise; empty if it keeps it."""
        slo = plan.slo
        if self.promised_ttft_s > slo.ttft_s:
            return f"simulated TTFT {self.promised_ttft_s:.2f} s > {slo.ttft_s:g} s"
        if self.promised_tpot_s > slo.tpot_s:
            return f"simulated TPOT {self.promised_tpot_s * 1e3:.1f} ms > {slo.tpot_s * 1e3:g} ms"
        return f"{self.num_failed} requests failed in the simulator" if self.num_failed else ""

    @property
    def is_full(self) -> bool:
        """Whether both roles had about the load that they are planned for."""
        return min(self.prefill_load, self.decode_load) >= LOAD_MIN


@dataclass(frozen=True)
class FleetDay:
    """What the fleet's role makes of a plan's day."""

    nodes_mean: float
    nodes_peak: int
    tokens_per_s_user: float
    wait_s_max: float
    """The longest that a queue would have taken."""


def part_of(plan: DeploymentPlan) -> tuple[int, int]:
    """(prefill, decode) units to simulate: the fleet if it is small, else the part that has its
    proportions best.
    """
    prefill, decode = plan.prefill, plan.decode
    most_decode = max(
        1, min(decode.num_peak, RUNNING_MAX // (decode.num_ranks * plan.decode_unit.batch))
    )
    most_prefill = max(
        1, min(prefill.num_peak, (RANKS_MAX - decode.num_ranks) // prefill.num_ranks)
    )
    found: list[tuple[float, int, int]] = []
    for num_decode in range(1, most_decode + 1):
        wanted = prefill.need_peak * num_decode / decode.need_peak
        for num_prefill in {math.floor(wanted), math.ceil(wanted)}:
            num = min(max(1, num_prefill), most_prefill)
            if found and num * prefill.num_ranks + num_decode * decode.num_ranks > RANKS_MAX:
                continue
            loads = prefill.need_peak / num, decode.need_peak / num_decode
            uneven = max(0.0, abs(math.log(loads[0] / loads[1])) - UNEVEN_MAX)
            found.append((round(uneven, 2), num, num_decode))
    _, num_prefill, num_decode = min(found, key=lambda one: (one[0], one[2], one[1]))
    return num_prefill, num_decode


def measure(
    plan: DeploymentPlan, rng: Generator, progress: Callable[[float], None] = lambda share: None
) -> Measured:
    """Run a part of the plan at the peak's load. `progress` is called with the share of simulated
    time that is done.
    """
    num_prefill, num_decode = part_of(plan)
    unit, peak_per_s = plan.decode_unit, plan.traffic.requests_per_s * plan.traffic.peak
    share = min(1.0, num_prefill / plan.prefill.need_peak, num_decode / plan.decode.need_peak)
    per_s, settle_s, measure_s = within_limits(plan, share * peak_per_s)
    share, end_s = per_s / peak_per_s, settle_s + measure_s
    # What is found of a prompt is given beforehand and read from the disk: prefill's memory has
    # nothing to keep.
    config = msgspec.structs.replace(
        deployment_of(plan, num_prefill=num_prefill, num_decode=num_decode),
        cache=CacheConfig(memory=OFF),
    )
    world = FleetWorld(
        config,
        {PREFILL: plan.prefill_unit.model, DECODE: unit.model},
        requests_of(plan, per_s, end_s, rng),
        max_context=CONTEXT_MAX,
        mtp_accept=plan.mtp_accept,
    )
    for step in range(1, _STEPS + 1):
        world.run(end_s * step / _STEPS)
        progress(step / _STEPS)
    seen = world.read(settle_s, end_s)
    ttft, tpot = _latency(seen.ttft_s), _latency(seen.decode.seconds_K, seen.decode.tokens_K)
    return Measured(
        num_prefill,
        num_decode,
        per_s,
        share * plan.prefill.need_peak / num_prefill,
        share * plan.decode.need_peak / num_decode,
        measure_s,
        len(seen.ttft_s),
        seen.num_failed,
        ttft,
        tpot,
        _promised(plan.slo.ttft_quantile, ttft.mean, seen.ttft_s, None),
        _promised(plan.slo.tpot_quantile, tpot.mean, seen.decode.seconds_K, seen.decode.tokens_K),
        seen.decode.requests_per_rank,
        seen.decode.positions_per_token,
    )


def within_limits(plan: DeploymentPlan, per_s: float) -> tuple[float, float, float]:
    """(requests/s, seconds before and while it is measured): as wanted, or as near to it as the
    limits allow.
    """
    settle_s = max(SETTLE_S, TTFTS_SETTLE * plan.slo.ttft_s)
    measure_s = max(MEASURE_S, TTFTS_MEASURE * plan.slo.ttft_s)
    least_s, running_s = SETTLE_S + MEASURE_S, plan.traffic.tokens_out * plan.decode_unit.tpot_s
    end_s = min(settle_s + measure_s, SECONDS_MAX, max(least_s, REQUESTS_MAX / per_s - running_s))
    part = end_s / (settle_s + measure_s)
    return min(per_s, REQUESTS_MAX / (end_s + running_s)), part * settle_s, part * measure_s


def fluid_of(plan: DeploymentPlan, rng: Generator) -> FleetDay:
    """The plan's day as a fluid, under the fleet role that serves; a large fleet's is that of its
    equal parts.
    """
    unit, traffic = plan.decode_unit, plan.traffic
    num_parts = math.ceil((plan.prefill.num_peak + plan.decode.num_peak) / FLUID_UNITS_MAX)
    batch_max = float(deployment_of(plan).decode.max_requests)
    batches = np.unique(np.concatenate(([1.0], np.linspace(4.0, max(5.0, batch_max), 12))))
    tpots = np.array(
        [
            1.0
            / (
                unit.model.decode(
                    float(batch),
                    traffic.kv_length_mean,
                    unit.mtp_tokens,
                    mtp_accept=plan.mtp_accept,
                    attention_imbalance=KV_UNEVEN,
                ).tokens_per_s_user
                or math.inf
            )
            for batch in batches
        ]
    )

    def rules(role: RolePlan) -> RoleRules:
        num_peak = math.ceil(role.num_peak / num_parts)
        num_min = num_peak if plan.rules.is_static else 1
        return RoleRules(math.ceil(role.unit_nodes), role.use, num_min, 2 * num_peak)

    model = UnitModel(
        plan.prefill.unit_tokens_per_s,
        plan.decode.num_ranks,
        lambda batch: np.interp(batch, batches, tpots),
        batch_max,
    )
    day = fluid_day(
        replace(traffic, requests_per_s=traffic.requests_per_s / num_parts),
        plan.rules,
        model,
        rules(plan.prefill),
        rules(plan.decode),
        plan.decode.unit_tokens_per_s,
        rng,
    )
    return FleetDay(
        num_parts * day.nodes_mean,
        num_parts * day.nodes_peak,
        day.tokens_per_s_user,
        day.wait_s_max,
    )


def requests_of(plan: DeploymentPlan, per_s: float, until_s: float, rng: Generator) -> Requests:
    """Those that run at the start, then Poisson arrivals."""
    num_running = round(per_s * plan.traffic.tokens_out * plan.decode_unit.tpot_s)
    running_in, running_out, done = _running(plan, num_running, rng)
    come = arrivals(plan.traffic, per_s, until_s, rng)
    return Requests(
        np.concatenate([np.full(len(done), -1.0), come.arrival_s]),
        np.concatenate([running_in, come.tokens_in]),
        np.concatenate([running_out, come.tokens_out]),
        np.concatenate([np.zeros_like(done), come.tokens_cached]),
        np.concatenate([done, come.tokens_done]),
    )


def arrivals(traffic: Traffic, per_s: float, until_s: float, rng: Generator) -> Requests:
    """Poisson arrivals of this traffic's prompts, as much of each in the cache as of the mean
    one.
    """
    size = int(rng.poisson(per_s * until_s))
    tokens_in, tokens_out = (_bounded(column) for column in traffic.draw(size, rng))
    cached = np.minimum(
        np.rint(traffic.cached_share * tokens_in / BLOCK_TOKENS), (tokens_in - 1) // BLOCK_TOKENS
    ).astype(np.int64)
    return Requests(
        np.sort(rng.uniform(0.0, until_s, size)), tokens_in, tokens_out, BLOCK_TOKENS * cached
    )


def _running(plan: DeploymentPlan, num: int, rng: Generator) -> tuple[Ints, Ints, Ints]:
    """(tokens in, out, done) of requests met at a random moment: the longer one's output, the
    likelier it is met.
    """
    tokens_in, tokens_out = (
        _bounded(column) for column in plan.traffic.draw(max(4 * num, 1000), rng)
    )
    weights = np.maximum(tokens_out - 1, 0).astype(np.float64)
    if not num or not weights.any():
        return (np.zeros(0, np.int64),) * 3
    rows = rng.choice(len(weights), num, p=weights / weights.sum())
    done = rng.integers(1, tokens_out[rows])
    return tokens_in[rows], tokens_out[rows], done


def _bounded(column: Ints) -> Ints:
    return np.asarray(np.clip(column, 1, CONTEXT_MAX // 4))


def _latency(seconds: Floats, weights: Floats | None = None) -> Latency:
    if not len(seconds):
        return Latency(*(math.nan,) * 4)
    return Latency(
        float(np.average(seconds, weights=weights)), *quantiles(seconds, (0.5, 0.9, 0.99), weights)
    )


def _promised(quantile: float, mean: float, seconds: Floats, weights: Floats | None) -> float:
    if quantile == MEAN or not len(seconds):
        return mean
    return quantiles(seconds, (quantile,), weights)[0]


# What was tried beside the best plan, and in a sentence why it loses.


_SMALL = 0.003
"""Differences of less are not spoken of."""


@dataclass(frozen=True)
class Row:
    """One line of what was tried."""

    dimension: str
    """What is not as in the best plan."""
    value: str
    plan: DeploymentPlan | None
    """None: there is none."""
    cost_usd: float | None
    """Cost of a day."""
    why: str
    """Why it loses; or, of what could not be chosen, what it would bring."""


def why(plan: DeploymentPlan, best: DeploymentPlan) -> str:
    """Why `plan` costs more than `best`, as a sentence without its full stop."""
    reasons = []
    if plan.hardware != best.hardware:
        if plan.rent.usd != best.rent.usd:
            reasons.append(f"${plan.rent.usd:g} instead of ${best.rent.usd:g} a GPU-hour")
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
                    f"in {name} units of {role.num_ranks} GPUs the day takes"
                    f" {role.rounded_share - 1.0:.0%} more than is needed, in units of"
                    f" {other.num_ranks} {other.rounded_share - 1.0:.0%}"
                )
    more = plan.cost_usd / best.cost_usd - 1.0
    if abs(more) < 5e-4 and not reasons:
        return "costs the same; the smaller one is taken"
    return f"{more:+.1%}" + (f": {'; '.join(reasons)}" if reasons else "")


def _decode(unit: DecodeUnit, best: DecodeUnit) -> list[str]:
    ratio = unit.tokens_per_s_gpu / best.tokens_per_s_gpu
    if abs(ratio - 1.0) < _SMALL:
        return []
    limit = ", for no more fit in memory," if unit.is_memory_bound else ""
    return [
        f"decode {unit} holds {unit.batch} requests a GPU at {unit.tpot_s * 1e3:.0f} ms{limit}"
        f" instead of {best.batch}"
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
        f"prefill {unit} takes {unit.tokens_per_s_gpu:,.0f} prompt tokens/s a GPU within the TTFT"
        f" instead of {best.tokens_per_s_gpu:,.0f}"
    ]


def dimension_rows(best: DeploymentPlan, found: HardwarePlans) -> Iterator[Row]:
    """Yield, for each dimension of the best plan, the next best value, and what of the narrowest
    units cannot be.
    """
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
    """Yield, for each role and width that cannot be at all or some variant of which cannot be, the
    one that came nearest.
    """
    nearest: dict[tuple[str, int], Rejected] = {}
    for one in rejected:
        key = one.role, one.num_ranks
        if key not in nearest or one.shortfall < nearest[key].shortfall:
            nearest[key] = one
    for one in nearest.values():
        yield Row(f"{one.role} width", one.what, None, None, one.why)


def what_if_rows(best: DeploymentPlan, found: HardwarePlans) -> Iterator[Row]:
    """The same traffic with what was not to be chosen: a static fleet, bundles, drafts, FP4."""
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
            f"{pricing.mtp_accept:.0%} of drafts accepted; --mtp-tokens 1 asks for it",
        )
    if FP4 not in choice.dtypes and pricing.hardware.fp4_flops:
        yield from row(
            "experts", "FP4", replace(choice, dtypes=(FP8, FP4)), "`hadal serve` loads none yet"
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
        f"{cost / best.cost_usd - 1.0:+.1%}: the scarcer role makes both grow, and units come in"
        " lots"
    )
    return Row("fleet", f"bundles of {sizes[0]} prefill + {sizes[1]} decode", None, cost, text)


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

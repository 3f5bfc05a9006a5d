"""Test of a plan in the simulator: its units under the server's own roles, at the day's peak load,
compared with its SLO.

A part of the fleet, with its ratio of prefill to decode units, gets the same part of the peak's
requests. It starts as if it had run for hours: decode units already have requests, with ages and
lengths of a random moment. The caller passes in random generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.random import Generator

from hadal.core.arrays import Floats, Ints
from hadal.core.balance import OFF
from hadal.core.config import DECODE, PREFILL, CacheConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.lab.sim.day.vessels import UnitModel
from hadal.lab.sim.plan.day import fluid_day
from hadal.lab.sim.plan.deploy import deployment_of
from hadal.lab.sim.plan.plan import DeploymentPlan, RolePlan
from hadal.lab.sim.plan.traffic import Traffic
from hadal.lab.sim.plan.units import KV_UNEVEN
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.seen import quantiles
from hadal.lab.sim.world.world import FleetWorld
from hadal.policy.scaling import RoleRules
from hadal.policy.slo import MEAN

SETTLE_S, MEASURE_S = 5.0, 8.0
"""Minimum simulated seconds: settling before the measurement, and the measurement. The limits below
may shorten one of them, but not their sum.
"""
TTFTS_SETTLE, TTFTS_MEASURE = 4.0, 5.0
"""Minimum settling and measurement as multiples of the TTFT target; the larger bound applies."""
RUNNING_MAX = 16_000
"""Maximum number of running requests on the simulated decode units. One unit always runs."""
RANKS_MAX = 1024
"""Maximum number of ranks of the simulated part of the fleet. One unit of each role always runs."""
SECONDS_MAX, REQUESTS_MAX = 600.0, 60_000
"""Maximum simulated seconds, and maximum number of requests that arrive or run at the start. If a
long TTFT target needs more, settling and measurement are shortened. If there are more requests in
the minimum time, the load of the units is lowered, and the result reports it.
"""
FLUID_UNITS_MAX = 400
"""Maximum number of units of a fluid day: 100 take 1 s, a large fleet takes more per unit."""
CONTEXT_MAX = 131_072
LOAD_MIN = 0.95
"""Smallest share of a role's planned load for a full test; the result reports a smaller one."""
UNEVEN_MAX = 0.04
"""Tolerated difference of the roles' loads in the simulated part: logarithm of their ratio."""
_STEPS = 20
"""Number of progress reports of a simulation."""


@dataclass(frozen=True)
class Latency:
    """Latency in seconds, over requests or over tokens."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Measured:
    """Measurements of a plan in the simulator."""

    num_prefill: int
    num_decode: int
    requests_per_s: float
    prefill_load: float
    """Load of the prefill units as a share of their planned load at the peak. Below 1 if they are
    more than needed, if whole units do not give the fleet's ratio, or due to REQUESTS_MAX.
    """
    decode_load: float
    """Load of the decode units as a share of their planned load at the peak."""
    seconds: float
    """Measured time."""
    num_requests: int
    """Requests with a first token in the measured time."""
    num_failed: int
    ttft_s: Latency
    tpot_s: Latency
    """Time per token, over tokens."""
    promised_ttft_s: float
    """Measured TTFT in the SLO's statistic (mean or quantile)."""
    promised_tpot_s: float
    """Measured TPOT in the SLO's statistic (mean or quantile)."""
    requests_per_rank: float
    kv_length: float

    def problem(self, plan: DeploymentPlan) -> str:
        """Return the reason why the plan misses its SLO; empty if it meets it."""
        slo = plan.slo
        if self.promised_ttft_s > slo.ttft_s:
            return f"simulated TTFT {self.promised_ttft_s:.2f} s > {slo.ttft_s:g} s"
        if self.promised_tpot_s > slo.tpot_s:
            return f"simulated TPOT {self.promised_tpot_s * 1e3:.1f} ms > {slo.tpot_s * 1e3:g} ms"
        return f"{self.num_failed} requests failed in the simulator" if self.num_failed else ""

    @property
    def is_full(self) -> bool:
        """True if both roles had at least LOAD_MIN of their planned load."""
        return min(self.prefill_load, self.decode_load) >= LOAD_MIN


@dataclass(frozen=True)
class FleetDay:
    """Result of a plan's day under the fleet role."""

    nodes_mean: float
    nodes_peak: int
    tokens_per_s_user: float
    wait_s_max: float
    """Longest time needed to work off the queues, seconds."""


def part_of(plan: DeploymentPlan) -> tuple[int, int]:
    """Return the (prefill, decode) units to simulate: the smallest part of the fleet that matches
    its proportions best, within the limits.
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
    """Run a part of the plan at the peak's load. `progress`: called with the finished share."""
    num_prefill, num_decode = part_of(plan)
    unit, peak_per_s = plan.decode_unit, plan.traffic.requests_per_s * plan.traffic.peak
    share = min(1.0, num_prefill / plan.prefill.need_peak, num_decode / plan.decode.need_peak)
    per_s, settle_s, measure_s = within_limits(plan, share * peak_per_s)
    share, end_s = per_s / peak_per_s, settle_s + measure_s
    # The cached part of each prompt is an input and read from disk; the memory cache is not needed.
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
    """Return (requests/s, settling s, measured s), as near to the wanted values as limits allow."""
    settle_s = max(SETTLE_S, TTFTS_SETTLE * plan.slo.ttft_s)
    measure_s = max(MEASURE_S, TTFTS_MEASURE * plan.slo.ttft_s)
    least_s, running_s = SETTLE_S + MEASURE_S, plan.traffic.tokens_out * plan.decode_unit.tpot_s
    end_s = min(settle_s + measure_s, SECONDS_MAX, max(least_s, REQUESTS_MAX / per_s - running_s))
    part = end_s / (settle_s + measure_s)
    return min(per_s, REQUESTS_MAX / (end_s + running_s)), part * settle_s, part * measure_s


def fluid_of(plan: DeploymentPlan, rng: Generator) -> FleetDay:
    """Run the plan's day as a fluid under the server's own fleet role. A large fleet is divided
    into equal parts, and one part is run.
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
    """Draw the requests that run at the start, then Poisson arrivals."""
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
    """Draw Poisson arrivals of this traffic, each with its cached share in full blocks."""
    size = int(rng.poisson(per_s * until_s))
    tokens_in, tokens_out = (_bounded(column) for column in traffic.draw(size, rng))
    cached = np.minimum(
        np.rint(traffic.cached_share * tokens_in / BLOCK_TOKENS), (tokens_in - 1) // BLOCK_TOKENS
    ).astype(np.int64)
    return Requests(
        np.sort(rng.uniform(0.0, until_s, size)), tokens_in, tokens_out, BLOCK_TOKENS * cached
    )


def _running(plan: DeploymentPlan, num: int, rng: Generator) -> tuple[Ints, Ints, Ints]:
    """Draw (tokens in, out, done) of running requests, weighted by the length of their output."""
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

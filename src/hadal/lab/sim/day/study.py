"""Input of a simulated day as one frozen value: hardware, prices, load, units, balancers, cache,
fleet.

Every field can be changed, by a TOML file or one by one; no field is a result. The default is the
day that DeepSeek published (DeepSeek-V3/R1 inference overview): its units, its load and its price
of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hadal.core.balance import AUTO, NO_MOVES, OFF, TURNS
from hadal.core.config import (
    PREFILL,
    ROLES,
    CacheConfig,
    Deployment,
    FleetConfig,
    LimitsConfig,
    UnitsConfig,
)
from hadal.lab.perf.hardware import hardware_named
from hadal.lab.perf.step import MTP_ACCEPT, StepModel
from hadal.lab.sim.day.cache import BUDGET_BYTES
from hadal.lab.sim.sessions import WorkloadParams
from hadal.lab.sim.world.units import kv_blocks
from hadal.policy.eviction import Arc, Lru
from hadal.policy.scaling import RoleRules, ScalingRules
from hadal.stats.prices import ModelPrices, micro_usd, price_list

PB = 1e15
CACHE_POLICIES: dict[str, type[Arc | Lru]] = {"arc": Arc, "lru": Lru}
_NUM_MAX = 1_000_000
"""Limit of running and of queued requests, far above a day's peak of about a hundred thousand."""


@dataclass(frozen=True)
class UnitsStudy:
    """Units of one role: their size, and the fleet's rules for their number."""

    ranks: int
    redundant_experts: int
    """Expert replicas in addition to one of each expert."""
    max_requests: int
    """Maximum number of requests of a rank."""
    bundle: int
    """Units of this role per bundle of the fleet. 0 for both roles: each role scales on its own."""
    extra: int
    """Units besides the bundles, always up."""
    units_min: int
    units_max: int
    use: float
    """Highest mean utilization of a unit."""
    request_balance: str = AUTO
    """auto, no_moves (decode only), off, or turns (each request goes to the next rank)."""
    expert_balance: str = AUTO
    """auto: replicas for the most loaded experts. off: spread evenly, independent of the loads."""


@dataclass(frozen=True)
class CacheStudy:
    """KV cache on disk, shared by the whole fleet."""

    disk_pb: float = BUDGET_BYTES / PB
    policy: str = "arc"
    """arc or lru."""
    sample: float = 8000.0
    """Sampling rate: one session in `sample` uses a cache smaller by this factor."""


@dataclass(frozen=True)
class FleetStudy:
    """Starts, stops and failures of units."""

    nodes_max: int = 2_000
    start_s: float = 600.0
    """Seconds from the decision until a unit is ready: other work frees nodes, weights are read."""
    start_spread: float = 0.1
    """Spread of `start_s`: uniform, plus or minus this share."""
    start_fail_share: float = 0.0
    """Share of starts that fail."""
    hold_s: float = 1800.0
    """A unit is stopped if it was not needed for this long and will not be for as long, seconds."""
    hours_between_failures: float = 0.0
    """Mean hours between failures of one node; 0: nodes do not fail."""
    noise: float = 0.02
    """Standard deviation of a minute's arrivals around the day's shape, as a share."""


@dataclass(frozen=True)
class WindowStudy:
    """Part of every hour in which every request is simulated."""

    seconds: float = 4.0
    """Measured time of a window."""
    prefill_seconds: float = 30.0
    """Measured time of a single prefill unit; long, because few long prompts dominate its work."""
    settle_s: float = 4.0
    """Simulated time before the measured time, in which running requests are placed."""
    first_token_s: float = 3.5
    """Assumed TTFT: requests that arrived up to this long before the start are in prefill then."""
    back_s: float = 3600.0
    """Sittings that began up to this time before the window are included."""


@dataclass(frozen=True)
class Study:
    """Input of a simulated day. The constructor raises ValueError for impossible values."""

    name: str = "deepseek-day"
    hardware: str = "h800"
    gpu_hour_usd: float = 2.0
    prices: str = "deepseek-reasoner-flat"
    """Name of a price list, or HIT/MISS/OUT in dollars per million tokens."""
    tpot_ms: float = 200.0 / 3.0
    """TPOT target at all times: 15 tokens/s. Only the reached mean was published, no target."""
    chunk_tokens: int = 24_576
    """Maximum number of tokens of a rank in a prefill step. Ranks get two thirds on average
    (roles/prefill/prompts): the 16K per GPU of the published prefill profile.
    """
    drafts: int = 1
    """Speculative tokens per request in each decode step (UnitsConfig.drafts). Not published;
    DeepSeek's profile of decode shows one.
    """
    mtp_accept: float = MTP_ACCEPT
    """Probability that a draft is accepted if all drafts before it were."""
    seed: int = 1
    prefill: UnitsStudy = UnitsStudy(
        32, 32, 64, bundle=3, extra=2, units_min=5, units_max=200, use=1.0
    )
    decode: UnitsStudy = UnitsStudy(
        144, 32, 160, bundle=1, extra=0, units_min=1, units_max=64, use=1.0
    )
    workload: WorkloadParams = field(default_factory=WorkloadParams)
    cache: CacheStudy = field(default_factory=CacheStudy)
    fleet: FleetStudy = field(default_factory=FleetStudy)
    window: WindowStudy = field(default_factory=WindowStudy)

    def __post_init__(self) -> None:
        hardware_named(self.hardware)
        price_list(self.prices)
        micro_usd(self.gpu_hour_usd)
        if self.cache.policy not in CACHE_POLICIES:
            raise ValueError(
                f"cache.policy is {self.cache.policy!r}; use one of {', '.join(CACHE_POLICIES)}."
            )
        for role, units in (("prefill", self.prefill), ("decode", self.decode)):
            known = (AUTO, OFF, TURNS) if role == "prefill" else (AUTO, NO_MOVES, OFF, TURNS)
            if units.request_balance not in known or units.expert_balance not in (AUTO, OFF):
                raise ValueError(
                    f"{role}: request_balance is {units.request_balance!r} (use one of"
                    f" {', '.join(known)}); expert_balance is {units.expert_balance!r}"
                    f" (use {AUTO} or {OFF})."
                )
        _check_numbers(self)
        self.rules()
        for role in ROLES:
            kv_blocks(self.step_model(role, 1.0), self.drafts, role)
        self.deployment(1, 1)

    def units_of(self, role: str) -> UnitsStudy:
        """Return the units of "prefill" or "decode"."""
        return self.prefill if role == PREFILL else self.decode

    def rules(self) -> ScalingRules:
        """Return the fleet's scaling rules. Raises ValueError for rules that cannot be met."""
        gpus = hardware_named(self.hardware).gpus_per_node

        def role(units: UnitsStudy) -> RoleRules:
            return RoleRules(
                -(-units.ranks // gpus),
                units.use,
                units.units_min,
                units.units_max,
                units.bundle,
                units.extra,
            )

        return ScalingRules(
            role(self.prefill),
            role(self.decode),
            self.fleet.nodes_max,
            start_s=self.fleet.start_s,
            hold_s=self.fleet.hold_s,
        )

    def step_model(self, role: str, placed: float) -> StepModel:
        """Return the step model of a role's unit. `placed`: imbalance of expert loads (maximum over
        mean of ranks) that its expert balancer leaves over a run.
        """
        units = self.units_of(role)
        return StepModel(
            units.ranks,
            hardware_named(self.hardware),
            num_redundant=units.redundant_experts,
            placed=placed,
        )

    def deployment(self, num_prefill: int, num_decode: int) -> Deployment:
        """Return a deployment with these numbers of units, as it would be configured to serve."""

        def units(count: int, study: UnitsStudy, drafts: int = 0) -> UnitsConfig:
            return UnitsConfig(
                count,
                ranks=study.ranks,
                ranks_per_node=hardware_named(self.hardware).gpus_per_node,
                redundant_experts=study.redundant_experts,
                request_balance=study.request_balance,
                expert_balance=study.expert_balance,
                drafts=drafts,
                max_requests=study.max_requests,
                max_waiting=_NUM_MAX,
            )

        return Deployment(
            prefill=units(num_prefill, self.prefill),
            decode=units(num_decode, self.decode, self.drafts),
            limits=LimitsConfig(max_running=_NUM_MAX, max_queued=_NUM_MAX),
            cache=CacheConfig(memory=OFF),
            fleet=FleetConfig(start_s=self.fleet.start_s, hold_s=self.fleet.hold_s),
            chunk_tokens=self.chunk_tokens,
        )

    def model_prices(self) -> ModelPrices:
        """Return the prices of the tokens sold."""
        return ModelPrices(price_list(self.prices))


def _check_numbers(study: Study) -> None:
    """Raise ValueError for the first number out of range, with its name in a study's file."""
    cache, fleet, window = study.cache, study.fleet, study.window
    for name, value in _numbers(study, ""):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be a finite number.")
    for name, value, least in (
        ("seed", study.seed, 0),
        ("drafts", study.drafts, 0),
        ("chunk_tokens", study.chunk_tokens, 1),
        ("cache.disk_pb", cache.disk_pb, 0),
        ("cache.sample", cache.sample, 1),
        ("fleet.noise", fleet.noise, 0),
        ("fleet.hours_between_failures", fleet.hours_between_failures, 0),
        ("window.settle_s", window.settle_s, 0),
        ("window.first_token_s", window.first_token_s, 0),
        ("window.back_s", window.back_s, 0),
        ("prefill.redundant_experts", study.prefill.redundant_experts, 0),
        ("decode.redundant_experts", study.decode.redundant_experts, 0),
        ("prefill.max_requests", study.prefill.max_requests, 1),
        ("decode.max_requests", study.decode.max_requests, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}.")
    for name, value in (("tpot_ms", study.tpot_ms), ("window.seconds", window.seconds)):
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0.")
    for name, value in (
        ("mtp_accept", study.mtp_accept),
        ("fleet.start_spread", fleet.start_spread),
    ):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be from 0 to 1.")
    if not 0 <= fleet.start_fail_share < 1:
        raise ValueError(
            f"fleet.start_fail_share is {fleet.start_fail_share}; it must be from 0 to below 1."
        )


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for all numbers in a value."""
    if is_dataclass(value):
        for one in fields(value):
            yield from _numbers(
                getattr(value, one.name), f"{path}.{one.name}" if path else one.name
            )
    elif isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{index}]")
    elif isinstance(value, int | float):
        yield path, float(value)

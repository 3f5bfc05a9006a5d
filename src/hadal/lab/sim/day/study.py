"""What is simulated, as one frozen value: hardware, prices, load, units, balancers, cache and
fleet.

Every field can be changed, by a TOML file or one by one; nothing that comes out is among them. The
default is the day that DeepSeek published (DeepSeek-V3/R1 inference overview): its units, its load
and its price for a GPU.
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
"""Most requests at once: a day has peaks of a hundred thousand and more."""


@dataclass(frozen=True)
class UnitsStudy:
    """Units of one role, and how the fleet holds them."""

    ranks: int
    redundant_experts: int
    """Replicas beyond the experts."""
    max_requests: int
    """Most requests of a rank."""
    bundle: int
    """Units of a bundle; 0 for both roles: each role grows by itself."""
    extra: int
    """Units beside the bundles, always there."""
    units_min: int
    units_max: int
    use: float
    """How busy a unit may be on average."""
    request_balance: str = AUTO
    """auto, no_moves (decode), off, or turns: each request to the next rank."""
    expert_balance: str = AUTO
    """auto: replicas where loads ask for them. off: spread without looking."""


@dataclass(frozen=True)
class CacheStudy:
    """The KV cache on disk, which the whole fleet shares."""

    disk_pb: float = BUDGET_BYTES / PB
    policy: str = "arc"
    """arc or lru."""
    sample: float = 8000.0
    """One session in so many meets a cache that is as much smaller."""


@dataclass(frozen=True)
class FleetStudy:
    """How units come and go."""

    nodes_max: int = 2_000
    start_s: float = 600.0
    """Time from a decision until a unit works: nodes are freed by other work, weights are read."""
    start_spread: float = 0.1
    """Spread of that time: uniform, plus or minus this share."""
    start_fail_share: float = 0.0
    hold_s: float = 1800.0
    """A unit is given up if it was not needed for so long, and will not be."""
    hours_between_failures: float = 0.0
    """Mean hours between failures of one node; 0: nodes do not fail."""
    noise: float = 0.02
    """Standard deviation of a minute's arrivals beside the day's shape."""


@dataclass(frozen=True)
class WindowStudy:
    """The part of every hour in which every request is one."""

    seconds: float = 4.0
    """Measured."""
    prefill_seconds: float = 30.0
    """The same where a prefill unit is measured by itself: few long prompts are much of its
    work.
    """
    settle_s: float = 4.0
    """Before that: what runs already finds its place."""
    first_token_s: float = 3.5
    """About how long a prompt takes: so many seconds' worth of them are under way at the start."""
    back_s: float = 3600.0
    """Sittings that began no longer ago are there."""


@dataclass(frozen=True)
class Study:
    """All of it. Raises ValueError at birth for what cannot be."""

    name: str = "deepseek-day"
    hardware: str = "h800"
    gpu_hour_usd: float = 2.0
    prices: str = "deepseek-reasoner-flat"
    """A list's name, or HIT/MISS/OUT in dollars per million tokens."""
    tpot_ms: float = 200.0 / 3.0
    """Promised per output token, whenever: 15 tokens/s. No promise was published, only what it
    comes to in the mean.
    """
    chunk_tokens: int = 24_576
    """Most of a rank in a prefill step; ranks are given two thirds of it in the mean
    (roles/prefill/prompts), which is the 16K a GPU of the published prefill profile.
    """
    drafts: int = 1
    """Tokens that decode drafts a step for each request, always as many (UnitsConfig.drafts). Not
    published; DeepSeek's profile of decode shows one.
    """
    mtp_accept: float = MTP_ACCEPT
    """How often a draft is right if those before it were."""
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
                f"cache.policy is {self.cache.policy!r}; known are {', '.join(CACHE_POLICIES)}."
            )
        for role, units in (("prefill", self.prefill), ("decode", self.decode)):
            known = (AUTO, OFF, TURNS) if role == "prefill" else (AUTO, NO_MOVES, OFF, TURNS)
            if units.request_balance not in known or units.expert_balance not in (AUTO, OFF):
                raise ValueError(
                    f"{role}: request_balance is {units.request_balance!r}, of {', '.join(known)};"
                    f" expert_balance is {units.expert_balance!r}, of {AUTO}, {OFF}."
                )
        _check_numbers(self)
        self.rules()
        for role in ROLES:
            kv_blocks(self.step_model(role, 1.0), self.drafts, role)
        self.deployment(1, 1)

    def units_of(self, role: str) -> UnitsStudy:
        """The units of "prefill" or "decode"."""
        return self.prefill if role == PREFILL else self.decode

    def rules(self) -> ScalingRules:
        """Return the rules that the fleet is given. Raises ValueError for rules that no fleet can
        keep.
        """
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
        """Return the step model of a role's unit. `placed` is what its expert balancer leaves of
        imbalance over a run, maximum over mean.
        """
        units = self.units_of(role)
        return StepModel(
            units.ranks,
            hardware_named(self.hardware),
            num_redundant=units.redundant_experts,
            placed=placed,
        )

    def deployment(self, num_prefill: int, num_decode: int) -> Deployment:
        """Return the deployment of so many units, as they would be configured to serve."""

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
        """Return the prices of what is sold."""
        return ModelPrices(price_list(self.prices))


def _check_numbers(study: Study) -> None:
    """Raise ValueError for the first number that cannot be, by its name in a study's file."""
    cache, fleet, window = study.cache, study.fleet, study.window
    for name, value in _numbers(study, ""):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: a finite number is needed.")
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
            raise ValueError(f"{name} is {value}: {least} or more is needed.")
    for name, value in (("tpot_ms", study.tpot_ms), ("window.seconds", window.seconds)):
        if value <= 0:
            raise ValueError(f"{name} is {value}: more than 0 is needed.")
    for name, value in (
        ("mtp_accept", study.mtp_accept),
        ("fleet.start_spread", fleet.start_spread),
    ):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}: 0 to 1 can be.")
    if not 0 <= fleet.start_fail_share < 1:
        raise ValueError(
            f"fleet.start_fail_share is {fleet.start_fail_share}: 0 or more, and less than 1,"
            " can be."
        )


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """All numbers in it, with their names."""
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

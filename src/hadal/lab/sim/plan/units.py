"""All candidate units: the throughput of each within a latency SLO by the step model, or the reason
why it is rejected.

A decode unit's batch is the largest that meets TPOT and fits in memory; TPOT rises with the batch,
so it is found by bisection. A prefill unit puts all queued prompts into its next step, so the load
determines the length of its steps. A prompt waits for half a step, for the step planned meanwhile,
and for its own step; so the TTFT target bounds the length of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np

from hadal.core.balance import AUTO
from hadal.core.config import DECODE, PREFILL
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig
from hadal.lab.perf.explain import StepPrice
from hadal.lab.perf.flags import prefill_flags
from hadal.lab.perf.hardware import Hardware
from hadal.lab.perf.imbalance import expected_maximum
from hadal.lab.perf.layer import MicroBatchLoad
from hadal.lab.perf.roofline import FP4, FP8
from hadal.lab.perf.step import MTP_ACCEPT, StepModel
from hadal.lab.sim.expert_loads import expert_share
from hadal.lab.sim.plan.traffic import Traffic
from hadal.lab.sim.world.units import HBM_SHARE, token_bytes
from hadal.overlap.plan import SCHEDULES
from hadal.perf.shapes import causal_pairs, kv_bytes_per_token
from hadal.policy.capacity import USE_MAX, prefill_use
from hadal.policy.slo import MEAN, Slo

DECODE_UNITS = (
    (4, 0),
    (8, 0),
    (8, 32),
    (16, 0),
    (16, 32),
    (32, 0),
    (32, 32),
    (64, 0),
    (64, 64),
    (72, 32),
    (72, 104),
    (96, 32),
    (96, 128),
    (128, 0),
    (128, 128),
    (144, 32),
    (144, 176),
    (192, 128),
    (288, 32),
    (320, 64),
)
"""(ranks, redundant experts) of candidates; more replicas than balance needs cost only memory."""
PREFILL_UNITS = ((4, 0), (8, 0), (16, 0), (32, 0), (32, 32), (64, 64), (72, 32))
"""(ranks, redundant experts) of candidates; 72 ranks only if one NVLink domain has them all."""
CHUNKS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Candidates for the most tokens of a rank in a prefill step."""
BATCH_MAX = 1024
"""Maximum number of requests of a decode rank."""
HBM_FULL = 0.98
"""Highest share of GPU memory for weights, KV and all buffers."""
KV_USE = 0.9
"""Planned share of a KV pool in use; the rest is for requests longer than the mean."""
SLOTS_OVER = 1.1
"""Slots of a decode rank over its planned batch: bursts raise TPOT slightly instead of queueing."""
KV_UNEVEN = 1.03
"""Core attention of the busiest decode rank over the mean."""
TOKENS_UNEVEN, PAIRS_UNEVEN, UNEVEN_POWER = 1.3, 1.1, 0.75
"""Excess of the busiest prefill rank's tokens, and of its (token, position) pairs, over the mean,
in units of expected_maximum(ranks) x sqrt((1 + variation^2) / 2) / (prompts of a rank's step) ^
power.

Fitted by `python -m bench.plan_fit` to simulated units of 8, 16 and 32 H800 or GB200, with 0.3 to
2.5 prompts per rank of log-normal lengths. A step of equal tokens is then priced 1 % too short on
average, 27 % too short to 33 % too long; at one rate, the steps of two seeds differ by up to 2x. A
larger power fits equally well, but prices heavy steps too short.
"""
STEPS_BEFORE = 3.4
"""Steps before a prompt's own: half of the running one, the one planned while it ran (two are in
flight), and postponements that balance the time of ranks. The simulated units of the fit above have
2.7 to 4.7, 3.35 on average.
"""
TTFT_TAIL = 0.6
"""Factor of the tail of TTFT: quantile q is TTFT_TAIL x ln(1 / (1 - q)) x mean, so p90 is 1.38x and
p99 2.76x the mean. The simulated units of the fit above have p90 at 1.17x to 1.78x the mean, p99 at
1.9x to 4.1x; 0.58 fits them best.
"""
_IDLE = 16.0
"""Range of priced steps: the smallest computes 1/_IDLE of a prompt per unit."""
SPARE_SIGMAS = 2.0
"""Spare capacity for uneven arrivals, in standard deviations of the Poisson number of requests."""


@dataclass(frozen=True)
class DecodeUnit:
    """Decode unit that meets the SLO."""

    model: StepModel
    mtp_tokens: int
    """Speculative tokens per request and step."""
    batch: int
    """Requests of a rank."""
    tpot_s: float
    """Seconds per output token with `batch` requests per rank."""
    tokens_per_s: float
    """Tokens/s of the unit with `batch` requests per rank."""
    is_memory_bound: bool
    """True if memory or BATCH_MAX limits the batch, and not the SLO."""
    price: StepPrice

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.tokens_per_s / self.model.num_ranks

    def __str__(self) -> str:
        drafts = (
            f", {self.mtp_tokens} draft{'s' if self.mtp_tokens > 1 else ''}"
            if self.mtp_tokens
            else ""
        )
        return f"EP{self.model.num_ranks}+{self.model.num_redundant}{_dtype(self.model)}{drafts}"


@dataclass(frozen=True)
class PrefillUnit:
    """Prefill unit that meets the SLO."""

    model: StepModel
    chunk_tokens: int
    """Maximum number of tokens of a rank in a step."""
    tokens_per_s: float
    """Prompt tokens/s in full steps, cached tokens included."""
    use: float
    """Highest share of `tokens_per_s` at which the unit still meets the SLO."""
    step_s: float
    """Duration of a step at utilization `use`."""
    ttft_s: float
    """Expected TTFT at utilization `use`, in the SLO's statistic (mean or quantile)."""
    price: StepPrice

    @property
    def tokens_per_s_kept(self) -> float:
        """Prompt tokens/s within the SLO, cached tokens included."""
        return self.tokens_per_s * self.use

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.tokens_per_s_kept / self.model.num_ranks

    def __str__(self) -> str:
        model = self.model
        return (
            f"EP{model.num_ranks}+{model.num_redundant}{_dtype(model)}, steps of"
            f" {self.chunk_tokens // 1024}K"
        )


@dataclass(frozen=True, slots=True)
class Rejected:
    """Candidate unit that misses the SLO or does not fit in memory."""

    role: str
    hardware: str
    num_ranks: int
    num_redundant: int
    what: str
    """Name of the unit, in the format of DecodeUnit and PrefillUnit."""
    why: str
    """Reason, as a sentence without its full stop."""
    shortfall: float = math.inf
    """Best latency over its limit: the smallest is the nearest miss; inf: it exceeds the memory."""


@dataclass(frozen=True)
class Pricing:
    """Pricing of all units of one hardware for a model, a traffic and an SLO."""

    hardware: Hardware
    model: ModelConfig
    traffic: Traffic
    slo: Slo
    mtp_accept: float = MTP_ACCEPT
    decode_share: float = 1.0
    """Share of the TPOT target that prices may use; lowered when a simulation misses the target."""
    prefill_share: float = 1.0
    """Share of the TTFT target that prices may use; lowered when a simulation misses the target."""
    tokens_uneven: float = TOKENS_UNEVEN
    pairs_uneven: float = PAIRS_UNEVEN
    uneven_power: float = UNEVEN_POWER

    @cached_property
    def _new(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return self.traffic.new_quantiles()

    # ---- decode ----
    def decode_units(
        self, mtp_tokens: int, dtypes: tuple[str, ...] = (FP8,)
    ) -> Iterator[DecodeUnit | Rejected]:
        """Yield the unit or its rejection for each of DECODE_UNITS that `step_model` allows."""
        for dtype in dtypes:
            for num_ranks, num_redundant in DECODE_UNITS:
                model = self.step_model(DECODE, num_ranks, num_redundant, dtype)
                if model is not None:
                    yield self.decode(model, mtp_tokens)

    def decode(self, model: StepModel, mtp_tokens: int) -> DecodeUnit | Rejected:
        """Return the unit with its largest batch within the SLO, or its rejection."""
        draft = f", {mtp_tokens} draft{'s' if mtp_tokens > 1 else ''}" if mtp_tokens else ""
        no = partial(self._rejected, DECODE, model, draft)
        most = self._batch_in_memory(model, mtp_tokens)
        if most < 1:
            return no(self._no_room(model, mtp_tokens))
        if self._kv_bytes(model, mtp_tokens) < self._context_tokens * token_bytes(
            model, mtp_tokens
        ):
            return no(
                f"a full context of {self.model.max_position_embeddings:,} tokens does not"
                f" fit beside {_gb(model.hbm_bytes(0, mtp_tokens))} of weights"
            )
        limit_s = self.slo.tpot_s * self.decode_share

        @cache
        def at(batch: int) -> StepPrice:
            return self._decode_price(model, batch, mtp_tokens)

        def tpot_s(batch: int) -> float:
            return 1.0 / (at(batch).tokens_per_s_user or math.inf)

        if tpot_s(1) > limit_s:
            ratio = tpot_s(1) / self.slo.tpot_s
            return no(f"TPOT {_ms(tpot_s(1))} > {_ms(limit_s)} at batch 1", ratio)
        is_memory_bound = tpot_s(most) <= limit_s
        low, high = (most, most) if is_memory_bound else (1, most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if tpot_s(middle) <= limit_s else (low, middle)
        price = at(low)
        tokens_per_s = price.tokens_per_s_gpu * model.num_ranks
        return DecodeUnit(model, mtp_tokens, low, tpot_s(low), tokens_per_s, is_memory_bound, price)

    def _decode_price(self, model: StepModel, batch: int, mtp_tokens: int) -> StepPrice:
        return model.decode(
            batch,
            self.traffic.kv_length_mean,
            mtp_tokens,
            mtp_accept=self.mtp_accept,
            attention_imbalance=KV_UNEVEN,
        )

    def _batch_in_memory(self, model: StepModel, mtp_tokens: int) -> int:
        one_tokens = self.traffic.kv_length_mean + BLOCK_TOKENS / 2
        one = model.hbm_bytes(one_tokens, mtp_tokens) - model.hbm_bytes(0, mtp_tokens)
        most = KV_USE * self._kv_bytes(model, mtp_tokens) / one
        buffers = SLOTS_OVER * (1 + mtp_tokens) * decode_buffer_bytes(model)
        free = HBM_FULL * self.hardware.hbm_bytes - model.hbm_bytes(0, mtp_tokens)
        return min(BATCH_MAX, max(0, int(min(most, free / (one / KV_USE + buffers)))))

    def _rejected(
        self, role: str, model: StepModel, kind: str, why: str, shortfall: float = math.inf
    ) -> Rejected:
        num_ranks, num_redundant = model.num_ranks, model.num_redundant
        what = f"EP{num_ranks}+{num_redundant}{_dtype(model)}{kind}"
        return Rejected(role, self.hardware.name, num_ranks, num_redundant, what, why, shortfall)

    # ---- prefill ----
    def prefill_units(self, dtypes: tuple[str, ...] = (FP8,)) -> Iterator[PrefillUnit | Rejected]:
        """Yield all candidates of PREFILL_UNITS that are possible, with every size of CHUNKS."""
        for dtype in dtypes:
            for num_ranks, num_redundant in PREFILL_UNITS:
                if num_ranks > 64 and num_ranks > self.hardware.nvlink_domain:
                    continue
                model = self.step_model(PREFILL, num_ranks, num_redundant, dtype)
                if model is not None:
                    yield from self.prefill_sizes(model)

    def prefill_sizes(
        self, model: StepModel, chunks: tuple[int, ...] = CHUNKS
    ) -> list[PrefillUnit | Rejected]:
        """Return this unit once per value of `chunks`, the most tokens of a rank in a step."""

        @cache
        def at(tokens: float) -> StepPrice:
            return self.prefill_price(model, tokens)

        return [self._prefill(model, chunk, at) for chunk in chunks]

    def _prefill(
        self, model: StepModel, chunk_tokens: int, at: Callable[[float], StepPrice]
    ) -> PrefillUnit | Rejected:
        traffic, slo = self.traffic, self.slo
        no = partial(self._rejected, PREFILL, model, f", steps of {chunk_tokens // 1024}K")
        # The pool must hold the prompts of three steps: one in computation, one planned, and one
        # computed but not yet pulled by decode.
        needed = max(
            3.0 * chunk_tokens / (1.0 - traffic.cached_share),
            3.0 * traffic.tokens_in,
            self._context_tokens,
        )
        if needed * kv_bytes_per_token(self.model) > prefill_kv_bytes(model, chunk_tokens):
            if self._kv_bytes(model, 0) <= 0:
                return no(self._no_room(model, 0))
            return no(
                f"KV of {needed:,.0f} tokens and buffers for steps of {chunk_tokens:,} do not fit"
                f" beside {_gb(model.hbm_bytes(0))} of weights"
            )
        tail = 1.0 if slo.ttft_quantile == MEAN else tail_of(slo.ttft_quantile)
        limit_s = slo.ttft_s * self.prefill_share / tail

        # With less than one prompt per step the unit idles between steps: fewer prompts wait, and a
        # step computes one prompt.
        one_tokens = min(float(chunk_tokens), traffic.tokens_new / model.num_ranks)
        own_steps = self.own_steps(chunk_tokens)

        def ttft_s(tokens: float) -> tuple[float, float]:
            step_s = at(max(tokens, one_tokens)).seconds
            return step_s, step_s * (STEPS_BEFORE * min(1.0, tokens / one_tokens) + own_steps)

        num_sizes = math.ceil(2.0 * math.log2(_IDLE * chunk_tokens / one_tokens)) + 1
        sizes = [chunk_tokens * 2.0 ** (-0.5 * i) for i in reversed(range(num_sizes))]
        expected = [ttft_s(size)[1] for size in sizes]
        if min(expected) > limit_s:
            least_s = min(expected) * tail
            return no(
                f"TTFT {least_s:.2f} s > {limit_s * tail:.2f} s even when idle",
                min(expected) / limit_s,
            )
        whole = at(sizes[-1])
        full_s, expected_s = ttft_s(sizes[-1])
        tokens_per_s = whole.tokens_per_s_gpu * model.num_ranks / (1.0 - traffic.cached_share)
        if expected_s < limit_s:
            # Full steps still meet the SLO, so a queue of prompts is what bounds the load.
            servers = max(1, round(model.num_ranks * chunk_tokens / traffic.tokens_new))
            use = prefill_use(expected_s, limit_s, servers, traffic.variation_in)
            step_s = full_s
        else:
            kept = max(i for i, seconds in enumerate(expected) if seconds <= limit_s)
            tokens = _longest(ttft_s, limit_s, sizes[kept], sizes[min(kept + 1, len(sizes) - 1)])
            step_s, expected_s = ttft_s(tokens)
            use = min(USE_MAX, tokens / step_s / (chunk_tokens / full_s))
        return PrefillUnit(model, chunk_tokens, tokens_per_s, use, step_s, expected_s * tail, whole)

    def own_steps(self, chunk_tokens: int) -> float:
        """Return the mean number of steps that compute a prompt in chunks of `chunk_tokens`."""
        return float(np.maximum(1.0, self._new / chunk_tokens).mean())

    def prefill_price(self, model: StepModel, tokens: float) -> StepPrice:
        """Price a step with `tokens` per rank by its busiest rank, under the cheapest schedule."""
        traffic = self.traffic
        cached = traffic.tokens_in * traffic.cached_share
        prompts = tokens / traffic.tokens_new
        spread = expected_maximum(model.num_ranks) * math.sqrt(
            0.5 * (1.0 + traffic.variation_in**2)
        )
        spread /= prompts**self.uneven_power
        uneven = [
            min(float(model.num_ranks), 1.0 + by * spread)
            for by in (self.tokens_uneven, self.pairs_uneven)
        ]
        pairs = prompts * causal_pairs(traffic.tokens_new, cached)
        prices = []
        for schedule in SCHEDULES.values():
            num = 1 if schedule.offset is None else 2
            imbalance = model.expected_imbalance(PREFILL, tokens / num, traffic.tokens_new)
            batch = MicroBatchLoad(
                tokens / num * uneven[0],
                pairs / num * uneven[1],
                tokens / num * uneven[0] * traffic.tokens_in / traffic.tokens_new,
                tokens / num,
                imbalance,
            )
            prices.append(model.price_works(PREFILL, schedule, [batch] * num, num_rows=prompts))
        best = min(prices, key=lambda price: price.seconds)
        return best.finished(
            tokens_per_s_gpu=tokens / best.seconds,
            tokens_per_s_user=None,
            extrapolated=prefill_flags(model, best.micro_batches[0], traffic.tokens_in),
            hbm_bytes=model.hbm_bytes(prompts * traffic.tokens_in),
        )

    # ---- both ----
    @property
    def _context_tokens(self) -> int:
        """Tokens that a pool needs: the longest context (runtime/pool_sizes) and 4 spare blocks."""
        return self.model.max_position_embeddings + 4 * BLOCK_TOKENS

    def step_model(
        self, role: str, num_ranks: int, num_redundant: int, dtype: str = FP8
    ) -> StepModel | None:
        """Return the step model of a unit; None if this hardware or model cannot form the unit."""
        per_node = self.hardware.gpus_per_node
        if (self.model.n_routed_experts + num_redundant) % num_ranks or (
            num_ranks > per_node and num_ranks % per_node
        ):
            return None
        if dtype == FP4 and not self.hardware.fp4_flops:
            return None
        placed = left_by_placement(role, num_ranks, num_redundant, self.hardware.nvlink_domain)
        return StepModel(
            num_ranks,
            self.hardware,
            self.model,
            num_redundant=num_redundant,
            placed=placed,
            expert_dtype=dtype,
        )

    def _kv_bytes(self, model: StepModel, mtp_tokens: int) -> float:
        return HBM_SHARE * self.hardware.hbm_bytes - model.hbm_bytes(0, mtp_tokens)

    def _no_room(self, model: StepModel, mtp_tokens: int) -> str:
        return (
            f"does not fit: weights take {_gb(model.hbm_bytes(0, mtp_tokens))} of"
            f" {_gb(self.hardware.hbm_bytes)}"
        )


def tail_of(quantile: float) -> float:
    """Return the ratio of a quantile of TTFT to its mean, at least 1."""
    return max(1.0, TTFT_TAIL * -math.log1p(-quantile))


@cache
def left_by_placement(role: str, num_ranks: int, num_redundant: int, node_ranks: int) -> float:
    """Return the imbalance of expert loads over a run after balancing: maximum over mean."""
    rng = np.random.default_rng(1)  # The same draws for all units, so that only shapes differ.
    return expert_share(
        AUTO, role, num_ranks, num_redundant, rng, ranks_per_node=node_ranks
    ).imbalance


def prefill_kv_bytes(model: StepModel, chunk_tokens: int) -> float:
    """Return the bytes of a prefill rank's KV pool: memory less weights and communication buffers.

    Each token of a step takes top_k rows in FP8 and BF16, out, in and decoded: 10 bytes per channel
    (runtime/memory).
    """
    hbm_bytes, weights = model.hardware.hbm_bytes, model.hbm_bytes(0)
    buffers = 10.1 * chunk_tokens * model.model.num_experts_per_tok * model.model.hidden_size
    return min(HBM_SHARE * hbm_bytes, HBM_FULL * hbm_bytes - buffers) - weights


def decode_buffer_bytes(model: StepModel) -> float:
    """Return the bytes of DeepEP's low-latency buffer per token of a decode rank's step. Every
    replica could get all tokens, in BF16, twice out and twice in (comm/layout).
    """
    num_replicas = model.num_expert_slots * model.num_ranks
    return 8.2 * num_replicas * model.model.hidden_size if model.num_ranks > 1 else 0.0


def decode_kv_bytes(model: StepModel, num_tokens: int, mtp_tokens: int) -> float:
    """Return the bytes of a decode rank's KV pool: memory less weights and communication buffers.
    `num_tokens`: most tokens of a step, drafts included.
    """
    hbm_bytes, buffers = model.hardware.hbm_bytes, num_tokens * decode_buffer_bytes(model)
    room = min(HBM_SHARE * hbm_bytes, HBM_FULL * hbm_bytes - buffers)
    return room - model.hbm_bytes(0, mtp_tokens)


def _longest(
    ttft_s: Callable[[float], tuple[float, float]], limit_s: float, low: float, high: float
) -> float:
    """Return the largest step within the TTFT limit, in tokens. `low` must meet it, `high` not."""
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if ttft_s(middle)[1] <= limit_s else (low, middle)
    return low


def _dtype(model: StepModel) -> str:
    return " fp4" if model.expert_dtype == FP4 else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.0f} GB"

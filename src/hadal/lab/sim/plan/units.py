"""Every unit that could be: what it does within a promise on latency, by the step model, or why it
cannot.

A decode unit's batch is the largest that keeps TPOT and fits in memory; TPOT rises with the batch,
so it is found by bisection. A prefill unit takes what waits into its next step, so its steps are as
long as the load makes them: a prompt waits for half a step, for the one that was planned meanwhile,
and for its own, which bounds how long steps may be.
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
"""(ranks, redundant experts) that are tried. Where some redundancy makes ranks even, more of it
only takes memory.
"""
PREFILL_UNITS = ((4, 0), (8, 0), (16, 0), (32, 0), (32, 32), (64, 64), (72, 32))
"""The same; 72 where all of them are in one NVLink domain."""
CHUNKS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of a rank in a prefill step, at most."""
BATCH_MAX = 1024
"""Requests of a decode rank: nobody plans for more."""
HBM_FULL = 0.98
"""Share of memory that is in use when everything is in it."""
KV_USE = 0.9
"""Share of a KV pool that is in use as planned: the rest is for requests that are longer than the
mean.
"""
SLOTS_OVER = 1.1
"""Slots of a decode rank over its planned batch: what comes unevenly gets a slot, a little slower,
and does not wait.
"""
KV_UNEVEN = 1.03
"""Core attention of the busiest decode rank over the mean."""
TOKENS_UNEVEN, PAIRS_UNEVEN, UNEVEN_POWER = 1.3, 1.1, 0.75
"""How far the busiest prefill rank's tokens, and its (token, position) pairs, are above the mean,
in units of expected_maximum(ranks) x sqrt((1 + variation^2) / 2) / (prompts of a rank's step) ^
power. Fitted by `python -m bench.plan_fit` to simulated units of 8, 16 and 32 H800 or GB200, at 0.3
to 2.5 prompts a rank, of log-normal lengths. A step of as many tokens is then priced 1 % too short
on average, 27 % too short to 33 % too long: at one rate, two seeds' steps are up to twice apart. A
larger power fits as well, and prices heavy steps too short.
"""
STEPS_BEFORE = 3.4
"""Before a prompt's own: half of the one that runs, the one that was planned while it ran (two are
in flight), and what is put off so that ranks take equal time. Of the same simulated units: 2.7 to
4.7, 3.35 on average.
"""
TTFT_TAIL = 0.6
"""A quantile q of TTFT is taken to be so many times ln(1 / (1 - q)) of the mean: 1.38 for p90, 2.76
for p99. The same units had p90 at 1.17 to 1.78 times the mean, p99 at 1.9 to 4.1 times; 0.58 fits
them best.
"""
_IDLE = 16.0
"""A unit is looked at down to so many times less than a prompt in each step."""
SPARE_SIGMAS = 2.0
"""Room for requests that come unevenly: standard deviations of their number, which is Poisson's."""


@dataclass(frozen=True)
class DecodeUnit:
    """A decode unit within the promise."""

    model: StepModel
    mtp_tokens: int
    batch: int
    """Requests of a rank."""
    tpot_s: float
    """Time per token at that batch."""
    tokens_per_s: float
    """Tokens/s of the unit at that batch."""
    is_memory_bound: bool
    """A larger batch would keep the promise, and does not fit."""
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
    """A prefill unit within the promise."""

    model: StepModel
    chunk_tokens: int
    """Most tokens of a rank in a step."""
    tokens_per_s: float
    """Prompt tokens, cached ones among them, in full steps."""
    use: float
    """Up to which share of that it keeps the promise."""
    step_s: float
    """Time of a step at that use."""
    ttft_s: float
    """What is then expected of what is promised."""
    price: StepPrice

    @property
    def tokens_per_s_kept(self) -> float:
        """Within the promise."""
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
    """A unit that cannot keep the promise, or cannot be at all."""

    role: str
    hardware: str
    num_ranks: int
    num_redundant: int
    what: str
    """The unit, as __str__ of one that is."""
    why: str
    """A sentence without its full stop."""
    shortfall: float = math.inf
    """How many times over the promise it is: the least of them is the next best. inf: it does not
    fit.
    """


@dataclass(frozen=True)
class Pricing:
    """What units of one hardware are priced for."""

    hardware: Hardware
    model: ModelConfig
    traffic: Traffic
    slo: Slo
    mtp_accept: float = MTP_ACCEPT
    decode_share: float = 1.0
    """Share of what the step model promises that is believed: a simulation that took longer than
    planned lowers it.
    """
    prefill_share: float = 1.0
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
        """All of them."""
        for dtype in dtypes:
            for num_ranks, num_redundant in DECODE_UNITS:
                model = self.step_model(DECODE, num_ranks, num_redundant, dtype)
                if model is not None:
                    yield self.decode(model, mtp_tokens)

    def decode(self, model: StepModel, mtp_tokens: int) -> DecodeUnit | Rejected:
        """The largest batch of this unit."""
        draft = f", {mtp_tokens} draft{'s' if mtp_tokens > 1 else ''}" if mtp_tokens else ""
        no = partial(self._rejected, DECODE, model, draft)
        most = self._batch_in_memory(model, mtp_tokens)
        if most < 1:
            return no(self._no_room(model, mtp_tokens))
        if self._kv_bytes(model, mtp_tokens) < self._context_tokens * token_bytes(
            model, mtp_tokens
        ):
            return no(
                f"a whole context of {self.model.max_position_embeddings:,} tokens does not fit"
                f" beside {_gb(model.hbm_bytes(0, mtp_tokens))} of weights"
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
        """All of them, with every size of a step."""
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
        """This unit with steps of so many tokens a rank at most, each."""

        @cache
        def at(tokens: float) -> StepPrice:
            return self.prefill_price(model, tokens)

        return [self._prefill(model, chunk, at) for chunk in chunks]

    def _prefill(
        self, model: StepModel, chunk_tokens: int, at: Callable[[float], StepPrice]
    ) -> PrefillUnit | Rejected:
        traffic, slo = self.traffic, self.slo
        no = partial(self._rejected, PREFILL, model, f", steps of {chunk_tokens // 1024}K")
        # Three steps' prompts at once: computed, planned, and computed but not yet pulled by
        # decode.
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

        # With less than one prompt in a unit's step the unit is idle between: less waits, and a
        # step is one prompt's.
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
            # Steps are full before the promise is broken: what comes beyond waits in a queue.
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
        """Steps that compute a prompt, mean over prompts, if a rank takes no more than so many
        tokens in one.
        """
        return float(np.maximum(1.0, self._new / chunk_tokens).mean())

    def prefill_price(self, model: StepModel, tokens: float) -> StepPrice:
        """A step of so many tokens a rank, attention as the busiest rank has it, under the cheapest
        schedule.
        """
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
        """A pool holds the longest context at least (runtime/pool_sizes), and a spare block or two."""
        return self.model.max_position_embeddings + 4 * BLOCK_TOKENS

    def step_model(
        self, role: str, num_ranks: int, num_redundant: int, dtype: str = FP8
    ) -> StepModel | None:
        """How steps of such a unit are priced. None: there is no such unit of this hardware, or of
        this model.
        """
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
            f"does not fit: weights {_gb(model.hbm_bytes(0, mtp_tokens))} of"
            f" {_gb(self.hardware.hbm_bytes)}"
        )


def tail_of(quantile: float) -> float:
    """A quantile of TTFT over its mean."""
    return max(1.0, TTFT_TAIL * -math.log1p(-quantile))


@cache
def left_by_placement(role: str, num_ranks: int, num_redundant: int, node_ranks: int) -> float:
    """Maximum over mean of what ranks receive over a whole run, as the expert balancer leaves
    it.
    """
    rng = np.random.default_rng(1)  # The same loads for all, so that units differ by what they are.
    return expert_share(
        AUTO, role, num_ranks, num_redundant, rng, ranks_per_node=node_ranks
    ).imbalance


def prefill_kv_bytes(model: StepModel, chunk_tokens: int) -> float:
    """Return the bytes of a prefill rank's pool: what weights leave, and the buffers that its
    tokens and their results travel through.

    Each of a step's tokens takes top_k rows in FP8 and BF16, out, in and decoded: 10 bytes a
    channel (runtime/memory).
    """
    hbm_bytes, weights = model.hardware.hbm_bytes, model.hbm_bytes(0)
    buffers = 10.1 * chunk_tokens * model.model.num_experts_per_tok * model.model.hidden_size
    return min(HBM_SHARE * hbm_bytes, HBM_FULL * hbm_bytes - buffers) - weights


def decode_buffer_bytes(model: StepModel) -> float:
    """Bytes of DeepEP's low-latency buffer for each token that a decode rank may have in a step:
    every replica could be sent all of them, in BF16, twice out and twice in (comm/layout).
    """
    num_replicas = model.num_expert_slots * model.num_ranks
    return 8.2 * num_replicas * model.model.hidden_size if model.num_ranks > 1 else 0.0


def decode_kv_bytes(model: StepModel, num_tokens: int, mtp_tokens: int) -> float:
    """Return the bytes of a decode rank's pool: what weights leave, and the buffers for so many
    tokens of a step, drafts among them.
    """
    hbm_bytes, buffers = model.hardware.hbm_bytes, num_tokens * decode_buffer_bytes(model)
    room = min(HBM_SHARE * hbm_bytes, HBM_FULL * hbm_bytes - buffers)
    return room - model.hbm_bytes(0, mtp_tokens)


def _longest(
    ttft_s: Callable[[float], tuple[float, float]], limit_s: float, low: float, high: float
) -> float:
    """Tokens of a step with which the promise is just kept: by `low`, not by `high`."""
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

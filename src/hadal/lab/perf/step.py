"""Price of one step of a DeepSeek-V3/R1 unit in seconds, from first principles, under the schedules
of overlap/plan.

    model = StepModel(num_ranks=144, hardware=HARDWARE["h800"])
    model.decode(88, 4989, mtp_tokens=1).seconds

A step consists of host work, dense layers, MoE layers walked by perf/price in the order of
execution, draft layers and the output head. `auto` chooses the cheapest schedule. Inputs are sizes,
and may be fractional because they are means over ranks. Fewer than two requests per rank (prefill:
tokens) are not cut into two micro-batches. Does not depend on requests or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hadal.core.config import DECODE, PREFILL
from hadal.core.model_config import ModelConfig
from hadal.core.plans import LinkBytes
from hadal.lab.perf.constants import CONSTANTS, Constants
from hadal.lab.perf.explain import DENSE_LAYERS, HOST, StepPart, StepPrice, part_of
from hadal.lab.perf.flags import decode_flags, prefill_flags
from hadal.lab.perf.hardware import H800, Hardware
from hadal.lab.perf.imbalance import expected_imbalance
from hadal.lab.perf.layer import Kernel, Layer, MicroBatchLoad, kernels_of, op_seconds
from hadal.lab.perf.links import COMM_SMS, Links
from hadal.lab.perf.roofline import BF16, DTYPE_BYTES, FP4, FP8, Roofline
from hadal.overlap.plan import ATTN_CORE, ATTN_IN, SCHEDULES, Schedule
from hadal.perf.price import OpSeconds, price_stack
from hadal.perf.shapes import (
    DEEPSEEK_V3,
    causal_pairs,
    kv_bytes_per_token,
    num_moe_layers,
    weight_bytes,
)

AUTO = "auto"
MTP_ACCEPT = 0.8
"""Acceptance of drafts (speculative tokens). Published for one: 80-90 % (arXiv 2505.09343)."""
REDUNDANT = 32
"""Expert replicas in addition to one of each expert, in DeepSeek's units (inference overview)."""
PLACED_BY_NODES = 1.16
"""Imbalance over a whole run, mean over layers, if expert groups are kept on nodes: our balancer on
SGLang's published loads of five prefill workloads (1.12-1.23, EP32). Free placement leaves 1.00
(three decode workloads, EP72). With two expert slots per rank (EP144) it leaves 1.15, which a
caller passes as `placed`.
"""


def redundant_default(model: ModelConfig, num_ranks: int) -> int:
    """Return REDUNDANT if slots divide evenly over ranks, else the fewest that do; 0 for 1 rank."""
    if num_ranks == 1:
        return 0
    if (model.n_routed_experts + REDUNDANT) % num_ranks == 0:
        return REDUNDANT
    return -model.n_routed_experts % num_ranks


def tokens_per_step(mtp_tokens: int, mtp_accept: float) -> float:
    """Return the expected tokens of a request per step; a draft needs all earlier ones accepted."""
    return sum(mtp_accept**i for i in range(mtp_tokens + 1))


class StepModel:
    """Prices of steps of a unit with `num_ranks` ranks. Raises ValueError for an impossible unit.

    `num_redundant`: expert replicas in addition to one of each; None: `redundant_default`.
    `placed`: imbalance (maximum over mean) that the expert placement leaves over a whole run. 1 is
    perfect; None: PLACED_BY_NODES for prefill across NVLink domains, else 1. `expert_dtype`: data
    type of routed experts' weights, fp8 or fp4.
    """

    def __init__(
        self,
        num_ranks: int,
        hardware: Hardware = H800,
        model: ModelConfig = DEEPSEEK_V3,
        *,
        num_redundant: int | None = None,
        placed: float | None = None,
        expert_dtype: str = FP8,
        constants: Constants = CONSTANTS,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a unit has {num_ranks} ranks; it needs at least 1.")
        redundant = redundant_default(model, num_ranks) if num_redundant is None else num_redundant
        num_replicas = model.n_routed_experts + redundant
        if redundant < 0 or num_replicas % num_ranks:
            raise ValueError(
                f"{model.n_routed_experts} experts and {redundant} redundant replicas do"
                f" not divide evenly among {num_ranks} ranks;"
                f" {redundant_default(model, num_ranks)} redundant replicas would."
            )
        if placed is not None and placed < 1.0:
            raise ValueError(f"placed (maximum / mean) is {placed}; it must be at least 1.")
        if expert_dtype not in (FP8, FP4) or (expert_dtype == FP4 and not hardware.fp4_flops):
            raise ValueError(
                f"experts in {expert_dtype!r} do not run on {hardware.name}: fp8 runs on"
                " all hardware, fp4 on b200 and gb200."
            )
        self.model, self.hardware, self.num_ranks, self.num_redundant = (
            model,
            hardware,
            num_ranks,
            redundant,
        )
        self.placed, self.expert_dtype, self.constants = placed, expert_dtype, constants
        self.num_expert_slots = num_replicas // num_ranks
        self.num_moe_layers = num_moe_layers(model)
        self._layer = Layer(model, self.num_expert_slots, expert_dtype)
        self._links = Links(model, hardware, num_ranks, constants)
        self._decode_line = Roofline(hardware, constants)
        self._prefill_line = Roofline(hardware, constants, is_sustained=True)
        compute_share = 1.0 - COMM_SMS / hardware.num_sms
        self._shared_line = Roofline(hardware, constants, compute_share, is_sustained=True)

    def decode(
        self,
        requests_per_rank: float,
        kv_tokens: float,
        mtp_tokens: int = 0,
        schedule: str = AUTO,
        *,
        mtp_accept: float = MTP_ACCEPT,
        expert_imbalance: float | None = None,
        attention_imbalance: float = 1.0,
    ) -> StepPrice:
        """Price a decode step in which each rank has `requests_per_rank` requests with a mean
        context of `kv_tokens`.

        Per request, the step verifies `mtp_tokens` drafts and makes as many new ones. Each draft is
        accepted with probability `mtp_accept` if all before it were. `expert_imbalance`: received
        rows of the busiest rank over the mean; None: `expected_imbalance` of a micro-batch.
        `attention_imbalance`: core attention of the busiest rank over the mean.
        """
        _check_positive("requests of a rank", requests_per_rank)
        _check_positive("KV tokens of a request", kv_tokens)
        if mtp_tokens < 0 or not 0.0 <= mtp_accept <= 1.0:
            raise ValueError(
                f"{mtp_tokens} speculative tokens, accepted with {mtp_accept}: use at"
                " least 0 tokens, and an acceptance from 0 to 1."
            )
        _check_imbalance(expert_imbalance, attention_imbalance)
        queries = 1 + mtp_tokens
        tokens = requests_per_rank * queries
        context = requests_per_rank * kv_tokens * attention_imbalance
        whole = MicroBatchLoad(tokens, context * queries, context, tokens)
        ways = []
        for way in self._ways(schedule, requests_per_rank):
            num = 1 if way.offset is None else 2
            imbalance = expert_imbalance or self.expected_imbalance(DECODE, tokens / num)
            ways.append((way, [_with(whole.scaled(1.0 / num), imbalance)] * num))
        best = self._cheapest(DECODE, ways, mtp_tokens, num_rows=tokens)
        flags = decode_flags(self, best.micro_batches[0], kv_tokens, queries)
        made = tokens_per_step(mtp_tokens, mtp_accept)
        return best.finished(
            tokens_per_s_gpu=requests_per_rank * made / best.seconds,
            tokens_per_s_user=made / best.seconds,
            extrapolated=flags,
            hbm_bytes=self.hbm_bytes(requests_per_rank * kv_tokens, mtp_tokens),
        )

    def prefill(
        self,
        tokens_per_rank: float,
        prompt_tokens: float,
        cached_tokens: float = 0.0,
        schedule: str = AUTO,
        *,
        expert_imbalance: float | None = None,
        attention_imbalance: float = 1.0,
    ) -> StepPrice:
        """Price a prefill step in which each rank computes `tokens_per_rank` tokens of prompts with
        `prompt_tokens` tokens.

        The first `cached_tokens` of each prompt are cached: attended to, but not computed. A prompt
        longer than the step counts as the mean of its chunks. Imbalances as for `decode`.
        """
        _check_positive("tokens of a rank", tokens_per_rank)
        _check_positive("tokens of a prompt", prompt_tokens)
        if not 0.0 <= cached_tokens < prompt_tokens:
            raise ValueError(
                f"{cached_tokens:g} of {prompt_tokens:g} prompt tokens are cached; at"
                " least one must be computed."
            )
        _check_imbalance(expert_imbalance, attention_imbalance)
        new = prompt_tokens - cached_tokens
        prompts = tokens_per_rank / new
        pairs = prompts * causal_pairs(new, cached_tokens) * attention_imbalance
        whole = MicroBatchLoad(tokens_per_rank, pairs, prompts * prompt_tokens, tokens_per_rank)
        ways = []
        for way in self._ways(schedule, tokens_per_rank):
            num = 1 if way.offset is None else 2
            imbalance = expert_imbalance or self.expected_imbalance(
                PREFILL, tokens_per_rank / num, new
            )
            ways.append((way, [_with(whole.scaled(1.0 / num), imbalance)] * num))
        best = self._cheapest(PREFILL, ways, 0, num_rows=prompts)
        return best.finished(
            tokens_per_s_gpu=tokens_per_rank / best.seconds,
            tokens_per_s_user=None,
            extrapolated=prefill_flags(self, best.micro_batches[0], prompt_tokens),
            hbm_bytes=self.hbm_bytes(prompts * prompt_tokens),
        )

    def price_works(
        self,
        phase: str,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatchLoad],
        *,
        num_rows: float,
        mtp_tokens: int = 0,
        num_draft_rows: float | None = None,
    ) -> StepPrice:
        """Price a step of given micro-batches, for simulators. `num_rows` rows go through the
        output head, then `num_draft_rows` for each of `mtp_tokens` new drafts. `num_draft_rows` is
        None for a step that verifies as many drafts as it makes.
        """
        return self._price(phase, schedule, micro_batches, mtp_tokens, num_rows, num_draft_rows)

    def expected_imbalance(
        self, phase: str, tokens_per_rank: float, text_tokens: float = 1.0
    ) -> float:
        """Return the expected imbalance of expert rows in one micro-batch of `tokens_per_rank`, in
        texts of `text_tokens` tokens each.
        """
        by_nodes = phase == PREFILL and self.num_ranks > self.hardware.nvlink_domain
        placed = self.placed or (PLACED_BY_NODES if by_nodes else 1.0)
        texts = self.num_ranks * tokens_per_rank / text_tokens if text_tokens > 1.0 else math.inf
        return expected_imbalance(
            self.num_ranks,
            tokens_per_rank * self.model.num_experts_per_tok,
            placed=placed,
            num_texts=texts,
            expert_slots_per_rank=self.num_expert_slots,
            affinity=self.constants.prompt_affinity,
        )

    def link_bytes(self, phase: str, num_tokens: float, mtp_tokens: int = 0) -> LinkBytes:
        """Return the bytes that a step with `num_tokens` tokens sends between the unit's ranks."""
        layers = self.num_moe_layers + mtp_tokens
        return self._links.link_bytes(phase, layers * num_tokens)

    def hbm_bytes(self, kv_tokens: float, mtp_tokens: int = 0) -> float:
        """Return the bytes of weights and KV of a rank, without activations and buffers. Draft
        layers are included if `mtp_tokens` is above 0.
        """
        # Additional drafts reuse the model's draft layers.
        num_draft_layers = min(mtp_tokens, self.model.num_nextn_predict_layers)
        kv_bytes = kv_bytes_per_token(self.model, self.model.num_hidden_layers + num_draft_layers)
        weights = weight_bytes(
            self.model, self.num_expert_slots, num_draft_layers, DTYPE_BYTES[self.expert_dtype]
        )
        return weights + kv_tokens * kv_bytes

    def kernels(
        self, phase: str, batch: MicroBatchLoad, *, is_overlapped: bool
    ) -> tuple[Kernel, ...]:
        """Return the kernels of an MoE layer on one micro-batch."""
        tokens, imbalance = batch.mean_tokens, batch.expert_imbalance
        if phase == DECODE:
            links_s = self._links.low_latency_s(tokens, imbalance, is_overlapped=is_overlapped)
            return self._layer.decode(self._decode_line, batch, links_s)
        links_s = self._links.normal_s(tokens, imbalance, is_overlapped=is_overlapped)
        line = self._shared_line if is_overlapped else self._prefill_line
        return self._layer.prefill(line, batch, links_s, self._links.received_ranks)

    def _ways(self, schedule: str, divisible: float) -> list[Schedule]:
        if schedule != AUTO and schedule not in SCHEDULES:
            raise ValueError(
                f"schedule {schedule!r} is unknown; use one of auto, {', '.join(SCHEDULES)}."
            )
        if schedule != AUTO:
            way = SCHEDULES[schedule]
            if way.offset is not None and divisible < 2.0:
                raise ValueError(
                    f"{schedule} needs two micro-batches; {divisible:g} cannot be divided"
                    " into two. Use sequential."
                )
            return [way]
        return [way for way in SCHEDULES.values() if way.offset is None or divisible >= 2.0]

    def _cheapest(
        self,
        phase: str,
        ways: list[tuple[Schedule, list[MicroBatchLoad]]],
        mtp_tokens: int,
        num_rows: float,
    ) -> StepPrice:
        prices = [self._price(phase, way, batches, mtp_tokens, num_rows) for way, batches in ways]
        return min(prices, key=lambda found: found.seconds)

    def _price(
        self,
        phase: str,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatchLoad],
        mtp_tokens: int,
        num_rows: float,
        num_draft_rows: float | None = None,
    ) -> StepPrice:
        is_overlapped = schedule.offset is not None and len(micro_batches) > 1
        post_s = self.constants.small_kernel_s if self.num_ranks > 1 else 0.0
        line = (
            self._decode_line
            if phase == DECODE
            else self._shared_line
            if is_overlapped
            else self._prefill_line
        )
        seen: dict[MicroBatchLoad, tuple[tuple[Kernel, ...], OpSeconds]] = {}
        for batch in micro_batches:
            if batch not in seen:
                kernels = self.kernels(phase, batch, is_overlapped=is_overlapped)
                seen[batch] = kernels, op_seconds(kernels, post_s)
        layers = self.num_moe_layers + mtp_tokens
        walked = price_stack(schedule, [seen[batch][1] for batch in micro_batches], layers)
        dense = [
            kernel
            for batch in micro_batches
            for kernel in (
                *kernels_of(seen[batch][0], ATTN_IN, ATTN_CORE),
                *self._layer.dense(line, batch),
            )
        ]
        parts = [part_of(DENSE_LAYERS, dense, self.model.first_k_dense_replace)]
        hidden = self.model.hidden_size
        if mtp_tokens:
            projections = [
                line.gemm(batch.num_tokens, hidden, 2 * hidden) for batch in micro_batches
            ]
            parts.append(part_of("draft projection", projections, mtp_tokens))
        # The output head verifies every row; each new draft then needs it once more.
        if num_draft_rows is None:
            num_draft_rows = num_rows / (1 + mtp_tokens)
        drafts = [num_draft_rows] * mtp_tokens
        heads = [
            line.gemm(rows, self.model.vocab_size, hidden, BF16) for rows in (num_rows, *drafts)
        ]
        parts.append(part_of("output head", heads))
        host_s = self.constants.step_overhead_s + num_rows * self.constants.row_overhead_s
        parts.append(StepPart("host and draw", host_s, HOST))
        return StepPrice(
            phase=phase,
            schedule=schedule,
            num_layers=layers,
            walked=walked,
            parts=tuple(parts),
            micro_batches=tuple(micro_batches),
            kernels=tuple(seen[batch][0] for batch in micro_batches),
            ops=tuple(seen[batch][1] for batch in micro_batches),
        )


def _with(batch: MicroBatchLoad, imbalance: float) -> MicroBatchLoad:
    return MicroBatchLoad(
        batch.num_tokens, batch.num_pairs, batch.context_tokens, batch.mean_tokens, imbalance
    )


def _check_positive(what: str, value: float) -> None:
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"{what}: {value:g}; it must be above 0 and finite.")


def _check_imbalance(expert: float | None, attention: float) -> None:
    for what, value in (("expert", expert), ("attention", attention)):
        if value is not None and not (value >= 1.0 and math.isfinite(value)):
            raise ValueError(
                f"{what} imbalance is {value:g}; maximum / mean must be finite and at least 1."
            )

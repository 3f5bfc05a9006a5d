"""Kernels of one DeepSeek-V3 layer on one micro-batch, with their times: the basis of a schedule's
ops.

Decode uses MLA's absorbed form over the latent cache, masked grouped GEMM and low-latency links.
Prefill expands keys and values, multiplies contiguous groups and uses normal links. Kernels and
their order follow DeepSeek's published decode and training profiles. Each kernel names its op;
nothing else depends on schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hadal.core.config import DECODE
from hadal.core.model_config import ModelConfig
from hadal.lab.perf.roofline import BF16, CONTIGUOUS, FP8, LINK, MASKED, Curve, Roofline, Timed
from hadal.overlap.plan import ATTN_CORE, ATTN_IN, COMBINE, DISPATCH, EXPERTS, GATE, SHARED
from hadal.perf.price import OpSeconds
from hadal.perf.shapes import (
    BF16_BYTES,
    FP8_BYTES,
    FP32_BYTES,
    absorbed_flops_per_pair,
    expanded_flops_per_pair,
    index_flops_per_pair,
    index_query_dim,
    left_out,
)

TOP_K_S = 34e-9
"""Seconds to choose a token's experts: 141 us for 4,096 tokens (DeepSeek's training profile)."""
MAP_S = 59e-9
"""Seconds to map a token to its experts' rows: 241 us for 4,096 tokens (profile of TOP_K_S)."""
DENSE = "dense"
"""Op name of a dense layer's MLP; no schedule has this op."""
_KNOWN_MAX = 4096


@dataclass(frozen=True, slots=True)
class MicroBatchLoad:
    """Load of one micro-batch: attention of the slowest rank, and the unit's mean times imbalance
    for experts and links.
    """

    num_tokens: float
    """Tokens of the slowest rank."""
    num_pairs: float
    """Number of (query token, position it attends to) pairs."""
    context_tokens: float
    """Tokens that attention reads from KV, once per request; in prefill new and cached ones."""
    mean_tokens: float
    """Tokens that a rank dispatches, mean over the unit."""
    expert_imbalance: float = 1.0
    """Expert rows of the busiest rank over the mean."""

    def scaled(self, by: float) -> MicroBatchLoad:
        return MicroBatchLoad(
            self.num_tokens * by,
            self.num_pairs * by,
            self.context_tokens * by,
            self.mean_tokens * by,
            self.expert_imbalance,
        )


class Kernel(NamedTuple):
    """One kernel, or one exchange on the link."""

    op: str
    name: str
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Kernels of a unit's layers. Shapes are equal in all MoE layers, and in all dense layers."""

    model: ModelConfig
    num_expert_slots: int
    """Expert replicas on a rank."""
    expert_dtype: str = FP8
    _known: dict[tuple[Roofline, str, float], tuple[tuple[Kernel, ...], ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Cache: (roofline, name, number of tokens) -> kernels; the same few token numbers recur."""

    def decode(
        self, line: Roofline, batch: MicroBatchLoad, links_s: tuple[float, float]
    ) -> tuple[Kernel, ...]:
        """Return an MoE layer's kernels in decode. `links_s`: seconds of (dispatch, combine)."""
        before, after, shared = self._once(line, DECODE, batch.num_tokens, self._decode_rest)
        return (
            *before,
            *self._index(line, batch),
            self._absorbed_core_attention(line, batch),
            *after,
            Kernel(DISPATCH, "dispatch", links_s[0], LINK),
            *shared,
            *self._experts(line, batch, MASKED),
            Kernel(COMBINE, "combine", links_s[1], LINK),
        )

    def _decode_rest(self, line: Roofline, tokens: float) -> tuple[tuple[Kernel, ...], ...]:
        """Return kernels: before core attention, from it to dispatch, and of the shared expert."""
        model = self.model
        heads, rank = model.num_attention_heads, model.kv_lora_rank
        turned = tokens * heads * (2 * model.qk_rope_head_dim + model.latent_dim) * BF16_BYTES
        before = (
            *self._projections(line, tokens),
            _kernel(
                ATTN_IN, "absorb W_UK", line.batched(tokens, heads, rank, model.qk_nope_head_dim)
            ),
            _kernel(ATTN_IN, "rope, write KV", line.elementwise(turned)),
        )
        after = (
            _kernel(ATTN_CORE, "absorb W_UV", line.batched(tokens, heads, model.v_head_dim, rank)),
            *self._output(line, tokens),
            *self._gate(line, tokens),
        )
        return before, after, self._shared(line, tokens)

    def _once(
        self,
        line: Roofline,
        name: str,
        tokens: float,
        make: Callable[[Roofline, float], tuple[tuple[Kernel, ...], ...]],
    ) -> tuple[tuple[Kernel, ...], ...]:
        found = self._known.get((line, name, tokens))
        if found is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            found = self._known[line, name, tokens] = make(line, tokens)
        return found

    def prefill(
        self, line: Roofline, batch: MicroBatchLoad, links_s: tuple[float, float], ranks: float
    ) -> tuple[Kernel, ...]:
        """Return the kernels of an MoE layer in prefill. `links_s`: seconds of (dispatch, combine).
        `ranks`: mean number of distinct ranks that receive a token.
        """
        rows, hidden = self._rows(batch), self.model.hidden_size
        tokens = batch.mean_tokens * batch.expert_imbalance
        copies = min(tokens * ranks, rows)
        reduced = (rows + copies) * hidden * BF16_BYTES
        return (
            *self._projections(line, batch.num_tokens),
            *self._expanded(line, batch),
            *self._gate(line, batch.num_tokens),
            Kernel(DISPATCH, "dispatch", links_s[0], LINK),
            *self._shared(line, batch.num_tokens),
            _kernel(EXPERTS, "map rows", line.elementwise(0.0, MAP_S * tokens)),
            _kernel(EXPERTS, "expand", line.elementwise((copies + rows) * hidden * FP8_BYTES)),
            *self._experts(line, batch, CONTIGUOUS),
            _kernel(EXPERTS, "weighted reduce", line.elementwise(reduced)),
            Kernel(COMBINE, "combine", links_s[1], LINK),
            _kernel(SHARED, "add", line.elementwise(3 * batch.num_tokens * hidden * BF16_BYTES)),
        )

    def dense(self, line: Roofline, batch: MicroBatchLoad) -> tuple[Kernel, ...]:
        """Return the kernels of a dense layer's MLP; its attention is that of an MoE layer."""
        return self._once(line, DENSE, batch.num_tokens, self._dense_mlp)[0]

    def _dense_mlp(self, line: Roofline, tokens: float) -> tuple[tuple[Kernel, ...], ...]:
        return (self._mlp(line, DENSE, tokens, self.model.intermediate_size),)

    def _rows(self, batch: MicroBatchLoad) -> float:
        return batch.mean_tokens * self.model.num_experts_per_tok * batch.expert_imbalance

    def _projections(self, line: Roofline, tokens: float) -> tuple[Kernel, ...]:
        model = self.model
        heads, latent = model.num_attention_heads, model.entry_dim + (model.index_n_heads or 0)
        q_rank = model.q_lora_rank
        queries = heads * model.qk_head_dim + index_query_dim(model)
        first = _kernel(ATTN_IN, "norm, quantise", self._norm(line, tokens))
        if q_rank is None:
            return first, _kernel(
                ATTN_IN, "q and kv_a", line.gemm(tokens, queries + latent, model.hidden_size)
            )
        lora = tokens * (q_rank + latent) * BF16_BYTES
        return (
            first,
            _kernel(ATTN_IN, "q_a and kv_a", line.gemm(tokens, q_rank + latent, model.hidden_size)),
            _kernel(ATTN_IN, "norms", line.elementwise(2 * lora)),
            _kernel(
                ATTN_IN, "quantise", line.elementwise(tokens * q_rank * (BF16_BYTES + FP8_BYTES))
            ),
            _kernel(ATTN_IN, "q_b", line.gemm(tokens, queries, q_rank)),
        )

    def _index(self, line: Roofline, batch: MicroBatchLoad) -> tuple[Kernel, ...]:
        """Return the indexer's kernels if tokens do not attend to all positions; else none.

        They are the scores of all pairs, which read the index keys of the whole context once per
        request, and the selection, which reads the scores. Priced in BF16 on MLA's curve:
        DeepSeek's own kernel is FP8, and no table of it is known.
        """
        model = self.model
        if not left_out(model, batch.num_tokens, batch.num_pairs):
            return ()
        scores = line.mla_decode(
            batch.num_tokens,
            batch.num_pairs,
            batch.context_tokens * (model.index_head_dim or 0) * BF16_BYTES,
            index_flops_per_pair(model),
            index_query_dim(model) * BF16_BYTES,
        )
        return (
            _kernel(ATTN_CORE, "index scores", scores),
            _kernel(ATTN_CORE, "select", line.elementwise(2 * batch.num_pairs * FP32_BYTES)),
        )

    def _absorbed_core_attention(self, line: Roofline, batch: MicroBatchLoad) -> Kernel:
        """Return core attention over the pairs that the indexer selects; all without an indexer. It
        reads the whole context once per request, or one latent per pair if that is less.
        """
        model = self.model
        pairs = batch.num_pairs * (1.0 - left_out(model, batch.num_tokens, batch.num_pairs))
        row_bytes = model.num_attention_heads * (model.latent_dim + model.kv_lora_rank) * BF16_BYTES
        attention = line.mla_decode(
            batch.num_tokens,
            pairs,
            min(batch.context_tokens, pairs) * model.latent_dim * BF16_BYTES,
            absorbed_flops_per_pair(model),
            row_bytes,
        )
        return _kernel(ATTN_CORE, "core attention", attention)

    def _expanded(self, line: Roofline, batch: MicroBatchLoad) -> tuple[Kernel, ...]:
        """Return the kernels of prefill's attention.

        With an indexer, the share of pairs that are left out is taken as the share of tokens in
        absorbed form, which attend to their selected positions. For the other tokens keys and
        values are expanded.
        """
        model, tokens = self.model, batch.num_tokens
        sparse = left_out(model, tokens, batch.num_pairs)
        context, pairs = batch.context_tokens * (1.0 - sparse), batch.num_pairs * (1.0 - sparse)
        heads, key, value = model.num_attention_heads, model.qk_head_dim, model.v_head_dim
        pair_flops = round(
            (1.0 - sparse) * expanded_flops_per_pair(model)
            + sparse * absorbed_flops_per_pair(model)
        )
        absorbed: tuple[Kernel, ...] = ()
        if sparse:
            both = model.qk_nope_head_dim + value
            timed = line.batched(tokens * sparse, heads, model.kv_lora_rank, both)
            absorbed = (_kernel(ATTN_IN, "absorb W_UK, W_UV", timed),)
        turned = 2 * tokens * heads * key * BF16_BYTES
        keys = context * heads * (model.qk_nope_head_dim + key) * BF16_BYTES
        moved = heads * (tokens * (key + value) + context * (key + value)) * BF16_BYTES
        attention = line.mha_prefill(tokens, pairs, pair_flops, moved)
        return (
            _kernel(
                ATTN_IN,
                "kv_b",
                line.gemm(context, heads * (model.qk_nope_head_dim + value), model.kv_lora_rank),
            ),
            _kernel(ATTN_IN, "rope, write KV", line.elementwise(turned)),
            _kernel(ATTN_IN, "gather keys", line.elementwise(keys)),
            *absorbed,
            *self._index(line, batch),
            _kernel(ATTN_CORE, "core attention", attention),
            *self._output(line, tokens),
        )

    def _output(self, line: Roofline, tokens: float) -> tuple[Kernel, ...]:
        width = self.model.num_attention_heads * self.model.v_head_dim
        return (
            _kernel(
                ATTN_CORE, "quantise", line.elementwise(tokens * width * (BF16_BYTES + FP8_BYTES))
            ),
            _kernel(ATTN_CORE, "o_proj", line.gemm(tokens, self.model.hidden_size, width)),
        )

    def _gate(self, line: Roofline, tokens: float) -> tuple[Kernel, ...]:
        model = self.model
        return (
            _kernel(GATE, "norm, quantise", self._norm(line, tokens)),
            _kernel(
                GATE, "gate", line.gemm(tokens, model.n_routed_experts, model.hidden_size, BF16)
            ),
            _kernel(
                GATE,
                "top-k",
                line.elementwise(tokens * model.n_routed_experts * 4.0, TOP_K_S * tokens),
            ),
        )

    def _shared(self, line: Roofline, tokens: float) -> tuple[Kernel, ...]:
        width = self.model.n_shared_experts * self.model.moe_intermediate_size
        return self._mlp(line, SHARED, tokens, width)

    def _mlp(self, line: Roofline, op: str, tokens: float, width: int) -> tuple[Kernel, ...]:
        hidden = self.model.hidden_size
        return (
            _kernel(op, f"{op} up", line.gemm(tokens, 2 * width, hidden)),
            _kernel(
                op, f"{op} SwiGLU", line.elementwise(tokens * width * (2 * BF16_BYTES + FP8_BYTES))
            ),
            _kernel(op, f"{op} down", line.gemm(tokens, hidden, width)),
        )

    def _experts(self, line: Roofline, batch: MicroBatchLoad, curve: Curve) -> tuple[Kernel, ...]:
        model, rows, dtype = self.model, self._rows(batch), self.expert_dtype
        hidden, width = model.hidden_size, model.moe_intermediate_size
        activated = rows * width * (2 * BF16_BYTES + FP8_BYTES)
        return (
            _kernel(
                EXPERTS,
                "experts up",
                line.grouped(curve, rows, self.num_expert_slots, 2 * width, hidden, dtype),
            ),
            _kernel(EXPERTS, "experts SwiGLU", line.elementwise(activated)),
            _kernel(
                EXPERTS,
                "experts down",
                line.grouped(curve, rows, self.num_expert_slots, hidden, width, dtype),
            ),
        )

    def _norm(self, line: Roofline, tokens: float) -> Timed:
        """Price a kernel that adds to the residual stream, normalises, and writes BF16 and FP8."""
        return line.elementwise(tokens * self.model.hidden_size * (4 * BF16_BYTES + FP8_BYTES))


def op_seconds(kernels: Sequence[Kernel], post_s: float) -> OpSeconds:
    """Sum kernels by op. `post_s`: seconds of the compute lane to issue or receive an exchange."""
    sums = dict.fromkeys((ATTN_IN, ATTN_CORE, GATE, DISPATCH, SHARED, EXPERTS, COMBINE), 0.0)
    for kernel in kernels:
        sums[kernel.op] += kernel.seconds
    return OpSeconds(
        sums[ATTN_IN],
        sums[ATTN_CORE],
        sums[GATE],
        sums[DISPATCH],
        sums[SHARED],
        sums[EXPERTS],
        sums[COMBINE],
        post_s,
    )


def kernels_of(kernels: Sequence[Kernel], *ops: str) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel.op in ops]


def _kernel(op: str, name: str, timed: Timed) -> Kernel:
    return Kernel(op, name, timed.seconds, timed.bound)

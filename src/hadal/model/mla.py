"""Multi-head latent attention (DeepSeek-V3, arXiv 2412.19437, eq. 1-11), in both forms, over a
paged latent cache; and its sparse form (DeepSeek-V3.2, arXiv 2512.02556, eq. 1-2).

The multi-head form expands keys and values from the latents; prefill uses it. The absorbed form
multiplies W_UK into the query and attends to the latents themselves. It is used by decode, by the
prefill of small models, and by tokens that see more than index_topk positions, for which an indexer
selects positions. The batch assigns tokens to requests.

Shapes: T tokens, H heads, Q q_lora_rank, C latent, R rotated, N plain key dims, W value dims, J
index heads, X index key, D cached = C+R, or C+R+X with an indexer, S positions seen, B rows, M
blocks of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.kernels.attention import available, mla_decode, select_positions
from hadal.kernels.products import heads_in, heads_out, linear, rms_norm
from hadal.model.batch import DecodeBatch, PrefillBatch, Span
from hadal.reference.attention import SeenEntries
from hadal.reference.params import INDEX_NORM_EPS, LATENT_NORM_EPS, AttentionWeights, IndexerWeights

ABSORBED_TOKENS = 64
"""Number of prompt tokens of a large model that attend in absorbed form at a time: their queries in
latent form take 17 MB in V3.
"""


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of several tokens in one layer."""

    nope_THN: Tensor
    rope_THR: Tensor
    index_TJX: Tensor | None = None
    """Rotated queries of the indexer; None if every token attends to all positions it sees."""
    index_weights_TJ: Tensor | None = None
    """Weights of the indexer's heads; None if `index_TJX` is."""

    def __len__(self) -> int:
        return len(self.nope_THN)

    def __getitem__(self, rows: slice) -> Queries:
        if self.index_TJX is None or self.index_weights_TJ is None:
            return Queries(self.nope_THN[rows], self.rope_THR[rows])
        index = self.index_TJX[rows], self.index_weights_TJ[rows]
        return Queries(self.nope_THN[rows], self.rope_THR[rows], *index)


def entries(
    x_TD: Tensor, weights: AttentionWeights, config: ModelConfig, cos_sin_TR: Tensor
) -> Tensor:
    """Return [T, D], each token's cache entry (eq. 1-5): normed c_kv, rotated key and, with an
    indexer, its key.
    """
    ck_TD = linear(x_TD, weights.kv_a)
    c_TC, k_TR = torch.split(ck_TD, [config.kv_lora_rank, config.qk_rope_head_dim], -1)
    c_TC = rms_norm(c_TC.contiguous(), weights.kv_a_norm_C, LATENT_NORM_EPS)
    parts = [c_TC, rotate(k_TR, cos_sin_TR)]
    if weights.indexer is not None:
        parts.append(_index_keys(x_TD, weights.indexer, cos_sin_TR))
    return torch.cat(parts, dim=-1)


def _index_keys(x_TD: Tensor, indexer: IndexerWeights, cos_sin_TR: Tensor) -> Tensor:
    """Return the indexer's keys [T, X]."""
    norm_X, bias_X = indexer.k_norm_X, indexer.k_norm_bias_X
    key_TX = F.layer_norm(linear(x_TD, indexer.k), norm_X.shape, norm_X, bias_X, INDEX_NORM_EPS)
    return rotate_halves(key_TX, cos_sin_TR)


def rotate(x: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Rotate interleaved pairs of x [T, R] or [T, H, R]. `cos_sin_TR`: cos of the R/2 pairs, then
    sin, looked up once per batch. The reference twin is reference.rope.rotate.
    """
    cos, sin = (cos_sin_TR if x.dim() == 2 else cos_sin_TR[:, None]).chunk(2, dim=-1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return (
        torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        .flatten(-2)
        .to(x.dtype)
    )


def rotate_halves(x: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Rotate the first R values of x [T, X] or [T, J, X], in pairs (x[i], x[R/2 + i])."""
    cos, sin = (cos_sin_TR if x.dim() == 2 else cos_sin_TR[:, None]).chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*(part.to(x.dtype) for part in rotated), rest), dim=-1)


def queries(
    x_TD: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    cos_sin_TR: Tensor,
    *,
    is_selecting: bool,
) -> Queries:
    """Return the tokens' queries, with the indexer's if `is_selecting`."""
    q_in_TD = x_TD
    if weights.q_a is not None:
        assert weights.q_a_norm_Q is not None
        q_in_TD = rms_norm(linear(x_TD, weights.q_a), weights.q_a_norm_Q, LATENT_NORM_EPS)
    q_THK = linear(q_in_TD, weights.q_b).view(-1, config.num_attention_heads, config.qk_head_dim)
    q_nope, q_rope = torch.split(q_THK, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    q_rope = rotate(q_rope, cos_sin_TR)
    if not is_selecting:
        return Queries(q_nope, q_rope)
    assert weights.indexer is not None
    assert config.index_n_heads is not None
    q_TJX = linear(q_in_TD, weights.indexer.q_b).view(len(x_TD), config.index_n_heads, -1)
    index_weights_TJ = linear(x_TD, weights.indexer.head_weights)
    return Queries(q_nope, q_rope, rotate_halves(q_TJX, cos_sin_TR), index_weights_TJ)


def prefill_core_attention(
    queries: Queries,
    entries_TD: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    batch: PrefillBatch,
    layer_index: int,
    *,
    final_only: bool,
) -> Tensor:
    """Return attention o [T, H*W] of the queries; with `final_only` they are only those of
    `batch.final_rows`. The tokens' own entries must already be in the cache.
    """
    if absorbs_prefill(config, batch.cache_PLSD):
        table_TM, lengths_T = batch.block_table_TM, batch.lengths_T
        if final_only:
            table_TM, lengths_T = table_TM[batch.final_rows], lengths_T[batch.final_rows]
        seen = SeenEntries(batch.cache_PLSD, layer_index, table_TM, lengths_T)
        return _absorbed(queries, weights, config, seen)
    outputs = []
    row = 0
    for index, span in enumerate(batch.spans):
        num_queries = span.num_tokens
        if final_only:
            if index not in batch.final_chunks:
                continue
            num_queries = 1
        asked = queries[row : row + num_queries]
        outputs += _of_span(asked, entries_TD, weights, config, batch, span, layer_index)
        row += num_queries
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _of_span(
    queries: Queries,
    entries_TD: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    batch: PrefillBatch,
    span: Span,
    layer_index: int,
) -> list[Tensor]:
    """Return outputs for the queries, which belong to the span's last tokens. Tokens that attend to
    all positions they see use the multi-head form, later tokens the absorbed form.
    """
    end = span.start + span.num_tokens
    dense_end = end if config.index_topk is None else min(end, config.index_topk)
    num_dense = max(0, len(queries) - (end - dense_end))
    outputs = []
    if num_dense:
        seen_SD = entries_TD[span.first : span.first + dense_end - span.start]
        if span.start:
            seen_SD = torch.cat((batch.context(span, layer_index), seen_SD))
        query_THK = torch.cat((queries.nope_THN, queries.rope_THR), dim=-1)[:num_dense]
        key_SHK, value_SHW = _expand(seen_SD, weights, config)
        outputs.append(_attend(query_THK, key_SHK, value_SHW, config.softmax_scale))
    # Offset of a token's row in the batch from its query's row.
    ahead = span.first + span.num_tokens - len(queries)
    for first in range(num_dense, len(queries), ABSORBED_TOKENS):
        rows = slice(first, min(first + ABSORBED_TOKENS, len(queries)))
        batch_rows = slice(ahead + rows.start, ahead + rows.stop)
        seen = SeenEntries(
            batch.cache_PLSD,
            layer_index,
            batch.block_table_TM[batch_rows],
            batch.lengths_T[batch_rows],
        )
        outputs.append(_absorbed(queries[rows], weights, config, seen))
    return outputs


def absorbs_prefill(config: ModelConfig, cache_PLSD: Tensor) -> bool:
    """Return whether prefill also attends in absorbed form.

    Per query, key and head the absorbed form needs 2C+R products and the multi-head form N+R+W
    (DeepSeek-V3: 1,088 and 320). But the absorbed form expands and pads nothing, and its kernel
    runs at more than twice the rate of torch's attention. So prefill uses it if it needs at most
    twice the products: in small models, not in DeepSeek-V3. Measured at 1.8 times: LOG.md.
    """
    absorbed = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    multi_head = config.qk_head_dim + config.v_head_dim
    return absorbed <= 2 * multi_head and available(cache_PLSD)


def _expand(
    entries_SD: Tensor, weights: AttentionWeights, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Return keys [S, H, N+R] and values [S, H, W] of every head (eq. 3, 5)."""
    heads = config.num_attention_heads
    c_SC = entries_SD[:, : config.kv_lora_rank]
    k_rope_SR = entries_SD[:, config.kv_lora_rank : config.latent_dim]
    both_SHK = linear(c_SC.contiguous(), weights.kv_b).view(len(c_SC), heads, -1)
    k_nope_SHN, value_SHW = torch.split(both_SHK, [config.qk_nope_head_dim, config.v_head_dim], -1)
    return torch.cat((k_nope_SHN, k_rope_SR[:, None].expand(-1, heads, -1)), dim=-1), value_SHW


def _attend(query_THK: Tensor, key_SHK: Tensor, value_SHW: Tensor, scale: float) -> Tensor:
    """Return causal attention of the last T of S positions, o [T, H*W]."""
    num_queries, num_seen = len(query_THK), len(key_SHK)
    value_dim, key_dim = value_SHW.shape[-1], key_SHK.shape[-1]
    # Pad keys or values to one size, as torch's fused kernels need: these are 3x faster on a CPU.
    if value_dim < key_dim:
        value_SHW = F.pad(value_SHW, (0, key_dim - value_dim))
    elif key_dim < value_dim:
        query_THK, key_SHK = (F.pad(x, (0, value_dim - key_dim)) for x in (query_THK, key_SHK))
    query, key, value = (x.transpose(0, 1)[None] for x in (query_THK, key_SHK, value_SHW))
    mask = None
    if 1 < num_queries < num_seen:
        mask = torch.ones(num_queries, num_seen, dtype=torch.bool, device=query.device).tril(
            num_seen - num_queries
        )
    causal = num_queries == num_seen
    out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
    return out[0, :, :, :value_dim].transpose(0, 1).flatten(1)


def decode_core_attention(
    queries: Queries,
    weights: AttentionWeights,
    config: ModelConfig,
    batch: DecodeBatch,
    layer_index: int,
) -> Tensor:
    """Return absorbed attention of one token per row, o [B, H*W]. The token's own entry must
    already be in the cache.
    """
    seen = SeenEntries(
        batch.cache_PLSD, layer_index, batch.block_table_BM, batch.lengths_B, batch.first
    )
    return _absorbed(queries, weights, config, seen)


def _absorbed(
    queries: Queries, weights: AttentionWeights, config: ModelConfig, seen: SeenEntries
) -> Tensor:
    """Return absorbed attention, o [B, H*W]. W_UK is applied to the queries and W_UV to the
    weighted sum of latents, so that all heads share the cached latents.
    """
    selected_BK = None
    if queries.index_TJX is not None:
        assert queries.index_weights_TJ is not None
        assert config.index_topk is not None
        selected_BK = select_positions(
            queries.index_TJX, queries.index_weights_TJ, seen, config.index_topk
        )
    q_latent_BHC = heads_in(queries.nope_THN, weights.kv_b)
    q_rope_BHR = queries.rope_THR.contiguous()
    o_BHC = mla_decode(q_latent_BHC, q_rope_BHR, seen, config.softmax_scale, selected_BK)
    return heads_out(o_BHC, weights.kv_b, config.v_head_dim).flatten(1)

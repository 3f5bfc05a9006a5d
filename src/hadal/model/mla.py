"""Multi-head latent attention (DeepSeek-V3, arXiv 2412.19437, eq. 1-11), in both forms, over a
paged latent cache.

Prefill expands keys and values from the latents and runs as multi-head attention; decode, and the
prefill of small models, multiplies W_UK into the query and attends to the latents themselves. Which
tokens belong to which request is in the batch; nothing here decides it.

Shapes: T tokens, H heads, Q q_lora_rank, C latent, R rotated, N plain key dims, W value dims, D
cached = C+R, S positions seen, B requests, M blocks of a request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.kernels.ops import available, heads_in, heads_out, linear, mla_decode, rms_norm
from hadal.model.batch import DecodeBatch, PrefillBatch
from hadal.reference.params import LATENT_NORM_EPS, AttentionWeights

# Rotation of interleaved pairs with the tokens' cos and sin looked up before, once per batch
# instead of per layer.


def rotate(x: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Rotate x [T, R] or [T, H, R]; cos_sin holds cos of the R/2 pairs, then sin. The twin is
    reference.rope.rotate.
    """
    cos, sin = (cos_sin_TR if x.dim() == 2 else cos_sin_TR[:, None]).chunk(2, dim=-1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return (
        torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        .flatten(-2)
        .to(x.dtype)
    )


def latents(
    x_TD: Tensor, weights: AttentionWeights, config: ModelConfig, cos_sin_TR: Tensor
) -> Tensor:
    """Return [T, C+R], what the cache holds of each token (eq. 1-5): normed c_kv, rotated key."""
    ck_TD = linear(x_TD, weights.kv_a)
    c_TC, k_TR = torch.split(ck_TD, [config.kv_lora_rank, config.qk_rope_head_dim], -1)
    c_TC = rms_norm(c_TC.contiguous(), weights.kv_a_norm_C, LATENT_NORM_EPS)
    return torch.cat((c_TC, rotate(k_TR, cos_sin_TR)), dim=-1)


def queries(
    x_TD: Tensor, weights: AttentionWeights, config: ModelConfig, cos_sin_TR: Tensor
) -> tuple[Tensor, Tensor]:
    """The queries alone, where a token's latents are computed elsewhere."""
    if weights.q_a is not None:
        assert weights.q_a_norm_Q is not None
        x_TD = rms_norm(linear(x_TD, weights.q_a), weights.q_a_norm_Q, LATENT_NORM_EPS)
    q_THK = linear(x_TD, weights.q_b).view(-1, config.num_attention_heads, config.qk_head_dim)
    q_nope, q_rope = torch.split(q_THK, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    return q_nope, rotate(q_rope, cos_sin_TR)


def prefill_core_attention(
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latents_TD: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    batch: PrefillBatch,
    layer_index: int,
    *,
    final_only: bool,
) -> Tensor:
    """Attend and return o [T, H*W]. With `final_only` the queries are those of `batch.final_rows`
    alone.

    The tokens' own latents must be in the cache already.
    """
    if absorbs_prefill(config, batch.cache_PLSD):
        table_TM, lengths_T = batch.block_table_TM, batch.lengths_T
        if final_only:
            table_TM, lengths_T = table_TM[batch.final_rows], lengths_T[batch.final_rows]
        return _absorbed(
            q_nope_THN,
            q_rope_THR,
            weights,
            config,
            batch.cache_PLSD,
            layer_index,
            table_TM,
            lengths_T,
        )
    query_THK = torch.cat((q_nope_THN, q_rope_THR), dim=-1)
    outputs = []
    row = 0
    for index, span in enumerate(batch.spans):
        num_queries = span.num_tokens
        if final_only:
            if index not in batch.final_chunks:
                continue
            num_queries = 1
        seen_SD = latents_TD[span.first : span.first + span.num_tokens]
        if span.start:
            seen_SD = torch.cat((batch.context(span, layer_index), seen_SD))
        key_SHK, value_SHW = _expand(seen_SD, weights, config)
        outputs.append(
            _attend(query_THK[row : row + num_queries], key_SHK, value_SHW, config.softmax_scale)
        )
        row += num_queries
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def absorbs_prefill(config: ModelConfig, cache_PLSD: Tensor) -> bool:
    """Whether prefill, too, attends in absorbed form.

    Per query, key and head it multiplies 2C+R values where the multi-head form multiplies N+R+W
    (DeepSeek-V3: 1,088 and 320), but expands nothing, pads nothing, and its kernel runs at more
    than twice the rate of torch's attention. So small models take it and DeepSeek's own shape does
    not. Measured at 1.8 times the products: LOG.md.
    """
    absorbed = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    multi_head = config.qk_head_dim + config.v_head_dim
    return absorbed <= 2 * multi_head and available(cache_PLSD)


def _expand(
    latents_SD: Tensor, weights: AttentionWeights, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Keys [S, H, N+R] and values [S, H, W] of every head (eq. 3, 5)."""
    heads = config.num_attention_heads
    c_SC, k_rope_SR = torch.split(latents_SD, [config.kv_lora_rank, config.qk_rope_head_dim], -1)
    both_SHK = linear(c_SC.contiguous(), weights.kv_b).view(len(c_SC), heads, -1)
    k_nope_SHN, value_SHW = torch.split(both_SHK, [config.qk_nope_head_dim, config.v_head_dim], -1)
    return torch.cat((k_nope_SHN, k_rope_SR[:, None].expand(-1, heads, -1)), dim=-1), value_SHW


def _attend(query_THK: Tensor, key_SHK: Tensor, value_SHW: Tensor, scale: float) -> Tensor:
    """Causal attention of the last T of S positions, o [T, H*W]."""
    num_queries, num_seen = len(query_THK), len(key_SHK)
    value_dim, key_dim = value_SHW.shape[-1], key_SHK.shape[-1]
    # The fused kernels want keys and values of one size (3x faster than the unfused one on a CPU):
    # pad the smaller.
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
    q_nope_BHN: Tensor,
    q_rope_BHR: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    batch: DecodeBatch,
    layer_index: int,
) -> Tensor:
    """Absorbed attention of one token per request, o [B, H*W]. The token's own latents must be in
    the cache already.
    """
    return _absorbed(
        q_nope_BHN,
        q_rope_BHR,
        weights,
        config,
        batch.cache_PLSD,
        layer_index,
        batch.block_table_BM,
        batch.lengths_B,
    )


def _absorbed(
    q_nope_BHN: Tensor,
    q_rope_BHR: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    cache_PLSD: Tensor,
    layer_index: int,
    block_table_BM: Tensor,
    lengths_B: Tensor,
) -> Tensor:
    """W_UK goes into the query and W_UV behind the sum, so that all heads share the cached
    latents.
    """
    q_latent_BHC = heads_in(q_nope_BHN, weights.kv_b)
    o_BHC = mla_decode(
        q_latent_BHC,
        q_rope_BHR.contiguous(),
        cache_PLSD,
        layer_index,
        block_table_BM,
        lengths_B,
        config.softmax_scale,
    )
    return heads_out(o_BHC, weights.kv_b, config.v_head_dim).flatten(1)

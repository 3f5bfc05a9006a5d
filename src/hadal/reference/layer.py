"""Decoder layer in plain torch, for reference forwards. The caller supplies the core attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.reference.experts import experts, gate
from hadal.reference.params import INDEX_NORM_EPS, LATENT_NORM_EPS, AttentionWeights, LayerWeights
from hadal.reference.products import linear, rms_norm, swiglu
from hadal.reference.rope import rotate, rotate_halves

IndexQueries = tuple[Tensor, Tensor]
"""Rotated queries [T, J, X] and weights [T, J] of the indexer's heads."""
CoreAttention = Callable[[Tensor, Tensor, Tensor, IndexQueries | None], Tensor]
"""(q_nope [T, H, N], q_rope [T, H, R], entry [T, D], IndexQueries or None) -> o [T, H, W]"""


def queries_and_entry(
    x_TD: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    cos_sin: Tensor,
    positions_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor, IndexQueries | None]:
    """Return (q_nope [T, H, N], q_rope [T, H, R] rotated, entry [T, C+R] or [T, C+R+X] as cached,
    the indexer's queries) (arXiv 2412.19437, eq. 1-9; arXiv 2512.02556, eq. 1).
    """
    q_in_TD = x_TD
    sizes = [config.kv_lora_rank, config.qk_rope_head_dim]
    c_TC, k_TR = torch.split(linear(x_TD, weights.kv_a), sizes, -1)
    if weights.q_a is not None:
        assert weights.q_a_norm_Q is not None
        q_in_TD = rms_norm(linear(x_TD, weights.q_a), weights.q_a_norm_Q, LATENT_NORM_EPS)
    q_THK = linear(q_in_TD, weights.q_b).view(
        len(x_TD), config.num_attention_heads, config.qk_head_dim
    )
    q_nope, q_rope = torch.split(q_THK, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    c_TC = rms_norm(c_TC, weights.kv_a_norm_C, LATENT_NORM_EPS)
    entry_TD = torch.cat((c_TC, rotate(k_TR, cos_sin, positions_T)), dim=-1)
    index_queries = None
    if (indexer := weights.indexer) is not None:
        key_TX = F.layer_norm(
            linear(x_TD, indexer.k),
            indexer.k_norm_X.shape,
            indexer.k_norm_X,
            indexer.k_norm_bias_X,
            INDEX_NORM_EPS,
        )
        entry_TD = torch.cat((entry_TD, rotate_halves(key_TX, cos_sin, positions_T)), dim=-1)
        q_TJX = linear(q_in_TD, indexer.q_b).view(len(x_TD), -1, key_TX.shape[-1])
        index_queries = (
            rotate_halves(q_TJX, cos_sin, positions_T),
            linear(x_TD, indexer.head_weights),
        )
    return q_nope, rotate(q_rope, cos_sin, positions_T), entry_TD, index_queries


def block(
    hidden_TD: Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    cos_sin: Tensor,
    positions_T: Tensor,
    attend: CoreAttention,
) -> Tensor:
    """Return the layer's output [T, D]."""
    x_TD = rms_norm(hidden_TD, layer.attn_norm_D, config.rms_norm_eps)
    o_THW = attend(*queries_and_entry(x_TD, layer.attention, config, cos_sin, positions_T))
    hidden_TD = hidden_TD + linear(o_THW.flatten(1), layer.attention.o)
    x_TD = rms_norm(hidden_TD, layer.ffn_norm_D, config.rms_norm_eps)
    if layer.mlp is not None:
        return hidden_TD + swiglu(x_TD, layer.mlp)
    assert layer.moe is not None
    ids_TK, weights_TK = gate(x_TD, layer.moe.router, layer.moe.router_bias_E, config)
    routed_TD = experts(x_TD, layer.moe.experts, ids_TK, weights_TK)
    return hidden_TD + swiglu(x_TD, layer.moe.shared) + routed_TD

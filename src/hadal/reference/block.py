"""One decoder layer in plain torch, for the two reference forwards. The attention core is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.reference.experts import experts
from hadal.reference.gate import gate
from hadal.reference.params import LATENT_NORM_EPS, AttentionWeights, LayerWeights
from hadal.reference.rms_norm import rms_norm
from hadal.reference.rope import rotate
from hadal.reference.swiglu import swiglu

AttentionCore = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_nope [T, H, N], q_rope [T, H, R], latent [T, D] of the same tokens) -> o [T, H, W]"""


def queries_and_latent(
    x_TD: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    cos_sin: Tensor,
    positions_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q_nope [T, H, N], q_rope [T, H, R] rotated, latent [T, C+R] as cached) (arXiv
    2412.19437, eq. 1-9).
    """
    sizes = [
        weights.qkv_a.shape[0] - config.latent_dim,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    ]
    q, c_TC, k_TR = torch.split(F.linear(x_TD, weights.qkv_a), sizes, -1)
    if weights.q_b is not None:
        assert weights.q_a_norm_Q is not None
        q = F.linear(rms_norm(q, weights.q_a_norm_Q, LATENT_NORM_EPS), weights.q_b)
    q_THK = q.view(len(x_TD), config.num_attention_heads, config.qk_head_dim)
    q_nope, q_rope = torch.split(q_THK, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    c_TC = rms_norm(c_TC, weights.kv_a_norm_C, LATENT_NORM_EPS)
    latent_TD = torch.cat((c_TC, rotate(k_TR, cos_sin, positions_T)), dim=-1)
    return q_nope, rotate(q_rope, cos_sin, positions_T), latent_TD


def block(
    hidden_TD: Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    cos_sin: Tensor,
    positions_T: Tensor,
    core: AttentionCore,
) -> Tensor:
    """Return the layer's output [T, D]."""
    x_TD = rms_norm(hidden_TD, layer.attn_norm_D, config.rms_norm_eps)
    o_THW = core(*queries_and_latent(x_TD, layer.attention, config, cos_sin, positions_T))
    hidden_TD = hidden_TD + F.linear(o_THW.flatten(1), layer.attention.o)
    x_TD = rms_norm(hidden_TD, layer.ffn_norm_D, config.rms_norm_eps)
    if layer.mlp is not None:
        return hidden_TD + swiglu(x_TD, layer.mlp)
    assert layer.moe is not None
    ids_TK, weights_TK = gate(x_TD, layer.moe.router_ED, layer.moe.router_bias_E, config)
    routed_TD = experts(x_TD, layer.moe.gate_up_E, layer.moe.down_E, ids_TK, weights_TK)
    return hidden_TD + swiglu(x_TD, layer.moe.shared) + routed_TD

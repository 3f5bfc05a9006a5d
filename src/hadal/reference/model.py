"""One decoder layer in plain torch, for the two reference forwards. The core attention is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.reference.ops import (
    experts,
    gate,
    heads_in,
    heads_out,
    linear,
    mla_decode,
    mla_prefill,
    rms_norm,
    rotate,
    swiglu,
)
from hadal.reference.params import LATENT_NORM_EPS, AttentionWeights, LayerWeights, ModelWeights

CoreAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
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
    sizes = [config.kv_lora_rank, config.qk_rope_head_dim]
    c_TC, k_TR = torch.split(linear(x_TD, weights.kv_a), sizes, -1)
    if weights.q_a is not None:
        assert weights.q_a_norm_Q is not None
        x_TD = rms_norm(linear(x_TD, weights.q_a), weights.q_a_norm_Q, LATENT_NORM_EPS)
    q_THK = linear(x_TD, weights.q_b).view(
        len(x_TD), config.num_attention_heads, config.qk_head_dim
    )
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
    attend: CoreAttention,
) -> Tensor:
    """Return the layer's output [T, D]."""
    x_TD = rms_norm(hidden_TD, layer.attn_norm_D, config.rms_norm_eps)
    o_THW = attend(*queries_and_latent(x_TD, layer.attention, config, cos_sin, positions_T))
    hidden_TD = hidden_TD + linear(o_THW.flatten(1), layer.attention.o)
    x_TD = rms_norm(hidden_TD, layer.ffn_norm_D, config.rms_norm_eps)
    if layer.mlp is not None:
        return hidden_TD + swiglu(x_TD, layer.mlp)
    assert layer.moe is not None
    ids_TK, weights_TK = gate(x_TD, layer.moe.router, layer.moe.router_bias_E, config)
    routed_TD = experts(x_TD, layer.moe.experts, ids_TK, weights_TK)
    return hidden_TD + swiglu(x_TD, layer.moe.shared) + routed_TD


# One decode step of the whole model over the paged cache, absorbed form: the twin of the fused
# step.
#
# Shapes: B requests, V vocabulary, P blocks, L layers, S block tokens, M blocks of a request, D =
# C+R latent.


def decode_step(
    weights: ModelWeights,
    cache_PLSD: Tensor,
    tokens_B: Tensor,
    positions_B: Tensor,
    block_table_BM: Tensor,
) -> Tensor:
    """Write each token's latents at its position, return logits [B, V] for the next one."""
    config = weights.config
    hidden_BD = weights.embed.rows(tokens_B)
    for index, layer in enumerate(weights.layers):
        attend = functools.partial(
            _paged_core_attention,
            layer,
            cache_PLSD,
            index,
            block_table_BM,
            positions_B,
            config.softmax_scale,
        )
        hidden_BD = block(hidden_BD, layer, config, weights.cos_sin, positions_B, attend)
    return linear(rms_norm(hidden_BD, weights.norm_D, config.rms_norm_eps), weights.head)


def _paged_core_attention(
    layer: LayerWeights,
    cache_PLSD: Tensor,
    index: int,
    block_table_BM: Tensor,
    positions_B: Tensor,
    scale: float,
    q_nope_BHN: Tensor,
    q_rope_BHR: Tensor,
    latent_BD: Tensor,
) -> Tensor:
    block_tokens = cache_PLSD.shape[2]
    block_B = block_table_BM.long().gather(1, (positions_B.long() // block_tokens)[:, None])[:, 0]
    cache_PLSD[block_B, index, positions_B.long() % block_tokens] = latent_BD
    q_latent_BHC = heads_in(q_nope_BHN, layer.attention.kv_b)
    o_BHC = mla_decode(
        q_latent_BHC, q_rope_BHR, cache_PLSD, index, block_table_BM, positions_B + 1, scale
    )
    num_values = layer.attention.o.shape[1] // o_BHC.shape[1]
    return heads_out(o_BHC, layer.attention.kv_b, num_values)


# A plain loop for one request: the oracle of every exactness test. No blocks, no batch, no
# absorbed form.
#
# Each layer keeps the latents of all positions in one tensor that grows; every step runs the
# multi-head form over it.


def forward(
    weights: ModelWeights, tokens_T: Tensor, latents: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (logits [T, V], hidden [T, D] after the last norm) of T tokens that follow those in
    `latents`.

    `latents` holds one [S, C+R] per layer and is extended by the T tokens; start with
    `no_latents(weights)`.
    """
    config = weights.config
    start = len(latents[0])
    positions_T = torch.arange(start, start + len(tokens_T), device=tokens_T.device)
    hidden_TD = weights.embed.rows(tokens_T)
    for index, layer in enumerate(weights.layers):
        attend = functools.partial(core_attention, layer, latents, index, config.softmax_scale)
        hidden_TD = block(hidden_TD, layer, config, weights.cos_sin, positions_T, attend)
    hidden_TD = rms_norm(hidden_TD, weights.norm_D, config.rms_norm_eps)
    return linear(hidden_TD, weights.head), hidden_TD


def no_latents(weights: ModelWeights) -> list[Tensor]:
    return [weights.norm_D.new_empty(0, weights.config.latent_dim) for _ in weights.layers]


def core_attention(
    layer: LayerWeights,
    latents: list[Tensor],
    index: int,
    scale: float,
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latent_TD: Tensor,
) -> Tensor:
    """Append the new latents to `latents[index]` and attend to all of them."""
    latents[index] = torch.cat((latents[index], latent_TD))
    return mla_prefill(q_nope_THN, q_rope_THR, latents[index], layer.attention.kv_b, scale)


@torch.inference_mode()
def generate(
    weights: ModelWeights, prompt: Sequence[int], max_tokens: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """Return up to `max_tokens` greedy tokens; a stop id ends them and is the last one."""
    device = weights.norm_D.device
    latents = no_latents(weights)
    logits_TV, _ = forward(weights, torch.tensor(prompt, device=device), latents)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(int(logits_TV[-1].argmax()))
        if output[-1] in stop_ids:
            break
        if len(output) < max_tokens:
            logits_TV, _ = forward(weights, torch.tensor(output[-1:], device=device), latents)
    return output


# The multi-token-prediction module over one whole text: drafts the token after the next. No cache,
# no batch.
#
# Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, eq. 21-23. T tokens, D hidden, V vocabulary.


def mtp(weights: ModelWeights, hidden_TD: Tensor, next_tokens_T: Tensor) -> Tensor:
    """Return logits [T, V] for token t+2 from the hidden state (after the last norm) of token t and
    the token t+1.

    Row 0 is position 0. Raises ValueError if the weights were read without the module.
    """
    config, module = weights.config, weights.mtp
    if module is None:
        raise ValueError("this model was read without its MTP module")
    embedded_TD = rms_norm(weights.embed.rows(next_tokens_T), module.enorm_D, config.rms_norm_eps)
    seen_TD = rms_norm(hidden_TD, module.hnorm_D, config.rms_norm_eps)
    x_TD = linear(torch.cat((embedded_TD, seen_TD), dim=-1), module.eh_proj)
    latents = [hidden_TD.new_empty(0, config.latent_dim)]
    attend = functools.partial(core_attention, module.layer, latents, 0, config.softmax_scale)
    positions_T = torch.arange(len(x_TD), device=x_TD.device)
    x_TD = block(x_TD, module.layer, config, weights.cos_sin, positions_T, attend)
    return linear(rms_norm(x_TD, module.head_norm_D, config.rms_norm_eps), weights.head)

"""One decoder layer in plain torch, for the two reference forwards. The core attention is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.messages import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig
from hadal.reference.ops import (
    best_positions,
    experts,
    gate,
    heads_in,
    heads_out,
    index_scores,
    linear,
    mla_decode,
    mla_prefill,
    rms_norm,
    rotate,
    rotate_halves,
    select_positions,
    swiglu,
)
from hadal.reference.params import (
    INDEX_NORM_EPS,
    LATENT_NORM_EPS,
    AttentionWeights,
    LayerWeights,
    ModelWeights,
    MtpWeights,
)

IndexQueries = tuple[Tensor, Tensor]
"""Rotated queries [T, J, X] and weights [T, J] of the indexer's heads."""
CoreAttention = Callable[[Tensor, Tensor, Tensor, IndexQueries | None], Tensor]
"""(q_nope [T, H, N], q_rope [T, H, R], entry [T, D] of the same tokens, the indexer's queries where
there is one) -> o [T, H, W]
"""


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


# One decode step of the whole model over the paged cache, absorbed form: the twin of the fused
# step.
#
# Shapes: B requests, V vocabulary, P blocks, L layers, S block tokens, M blocks of a request, D
# values of an entry.


def decode_step(
    weights: ModelWeights,
    cache_PLSD: Tensor,
    tokens_B: Tensor,
    positions_B: Tensor,
    block_table_BM: Tensor,
) -> Tensor:
    """Write each token's entries at its position, return logits [B, V] for the next one."""
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
            config,
        )
        hidden_BD = block(hidden_BD, layer, config, weights.cos_sin, positions_B, attend)
    return linear(rms_norm(hidden_BD, weights.norm_D, config.rms_norm_eps), weights.head)


def _paged_core_attention(
    layer: LayerWeights,
    cache_PLSD: Tensor,
    index: int,
    block_table_BM: Tensor,
    positions_B: Tensor,
    config: ModelConfig,
    q_nope_BHN: Tensor,
    q_rope_BHR: Tensor,
    entry_BD: Tensor,
    index_queries: IndexQueries | None,
    first: int = 0,
) -> Tensor:
    _write(cache_PLSD, index, block_table_BM, positions_B, entry_BD)
    seen = cache_PLSD, index, block_table_BM, positions_B + 1
    selected_BK = None
    if index_queries is not None:
        assert config.index_topk is not None
        q_BJX, weights_BJ = index_queries
        selected_BK = select_positions(q_BJX, weights_BJ, *seen, config.index_topk, first)
    q_latent_BHC = heads_in(q_nope_BHN, layer.attention.kv_b)
    o_BHC = mla_decode(q_latent_BHC, q_rope_BHR, *seen, config.softmax_scale, selected_BK, first)
    return heads_out(o_BHC, layer.attention.kv_b, config.v_head_dim)


def _write(
    cache_PLSD: Tensor, index: int, block_table_BM: Tensor, positions_B: Tensor, entry_BD: Tensor
) -> None:
    """Write each row's entry of a layer at its position."""
    block_tokens = cache_PLSD.shape[2]
    block_B = block_table_BM.long().gather(1, (positions_B.long() // block_tokens)[:, None])[:, 0]
    cache_PLSD[block_B, index, positions_B.long() % block_tokens] = entry_BD


# A plain loop for one request: the oracle of every exactness test. No blocks, no batch, no
# absorbed form.
#
# Each layer keeps the entries of all positions in one tensor that grows; every step runs the
# multi-head form over it.


def forward(
    weights: ModelWeights, tokens_T: Tensor, latents: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (logits [T, V], hidden [T, D] after the last norm) of T tokens that follow those in
    `latents`.

    `latents` holds one [S, D] per layer and is extended by the T tokens; start with
    `no_latents(weights)`.
    """
    config = weights.config
    start = len(latents[0])
    positions_T = torch.arange(start, start + len(tokens_T), device=tokens_T.device)
    hidden_TD = weights.embed.rows(tokens_T)
    for index, layer in enumerate(weights.layers):
        attend = functools.partial(core_attention, layer, latents, index, config)
        hidden_TD = block(hidden_TD, layer, config, weights.cos_sin, positions_T, attend)
    hidden_TD = rms_norm(hidden_TD, weights.norm_D, config.rms_norm_eps)
    return linear(hidden_TD, weights.head), hidden_TD


def no_latents(weights: ModelWeights) -> list[Tensor]:
    return [weights.norm_D.new_empty(0, weights.config.entry_dim) for _ in weights.layers]


def core_attention(
    layer: LayerWeights,
    latents: list[Tensor],
    index: int,
    config: ModelConfig,
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    entry_TD: Tensor,
    index_queries: IndexQueries | None,
) -> Tensor:
    """Append the new entries to `latents[index]` and attend to them, or to those that the indexer
    selects.
    """
    latents[index] = torch.cat((latents[index], entry_TD))
    latents_SD, key_SX = latents[index].tensor_split([config.latent_dim], dim=-1)
    left_out_TS = None
    if index_queries is not None:
        left_out_TS = _left_out(index_scores(*index_queries, key_SX), config.index_topk)
    return mla_prefill(
        q_nope_THN, q_rope_THR, latents_SD, layer.attention.kv_b, config.softmax_scale, left_out_TS
    )


def _left_out(scores_TS: Tensor, num_selected: int | None) -> Tensor | None:
    """Where [T, S] the last T of S tokens do not attend to, of what they see; None: to all."""
    num_new, num_seen = scores_TS.shape
    if num_selected is None or num_seen <= num_selected:
        return None
    unseen_TS = torch.ones_like(scores_TS, dtype=torch.bool).triu(1 + num_seen - num_new)
    best_TK = best_positions(scores_TS.masked_fill(unseen_TS, float("-inf")), num_selected)
    return torch.ones_like(unseen_TS).scatter(1, best_TK.long(), False)


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


# The multi-token-prediction module: drafts the token after the next from what the model already
# computed. Over one whole text, without cache and batch, and as the twin of the fused draft step.
#
# Its entry at position q is made of token q and the model's hidden state of position q-1, of zeros
# where q begins a block: so a block's entries depend on its own and earlier tokens alone, and a row
# at q drafts token q+1. There is an entry at position 0, of zeros and token 0, so that no block has
# a gap; the module of the paper has none there, and no row attends to it.
#
# Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, eq. 21-23. T tokens, D hidden, V vocabulary.


def mtp(weights: ModelWeights, hidden_TD: Tensor, next_tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logits [T, V] for token t+2, hidden [T, D] after the module's last norm) from the
    hidden state (after the last norm) of token t and the token t+1.

    Row 0 is position 0. Raises ValueError if the weights were read without the module.
    """
    module, config = _module(weights), weights.config
    positions_T = torch.arange(1, 1 + len(hidden_TD), device=hidden_TD.device)
    hidden_TD = hidden_TD.masked_fill((positions_T % BLOCK_TOKENS == 0)[:, None], 0.0)
    x_TD = _combined(weights, next_tokens_T, hidden_TD)
    latents = [hidden_TD.new_empty(0, config.entry_dim)]
    attend = functools.partial(core_attention, module.layer, latents, 0, config)
    x_TD = block(x_TD, module.layer, config, weights.cos_sin, positions_T, attend)
    x_TD = rms_norm(x_TD, module.head_norm_D, config.rms_norm_eps)
    return linear(x_TD, weights.head), x_TD


def draft_step(
    weights: ModelWeights,
    cache_PLSD: Tensor,
    tokens_T: Tensor,
    positions_T: Tensor,
    block_table_TM: Tensor,
    hidden_TD: Tensor,
    num_full: int,
) -> tuple[Tensor, Tensor]:
    """Write each token's entry of the module at its position, return (logits [num_full, V] for the
    token behind it, hidden [num_full, D] after the module's last norm) of the first rows.

    `hidden_TD`: the hidden state of the position before, zeros at a block's first position.
    """
    module, config, index = _module(weights), weights.config, len(weights.layers)
    x_TD = _combined(weights, tokens_T, hidden_TD)
    normed_TD = rms_norm(x_TD, module.layer.attn_norm_D, config.rms_norm_eps)
    _, _, entries_TD, _ = queries_and_entry(
        normed_TD, module.layer.attention, config, weights.cos_sin, positions_T
    )
    _write(cache_PLSD, index, block_table_TM, positions_T, entries_TD)
    attend = functools.partial(
        _paged_core_attention,
        module.layer,
        cache_PLSD,
        index,
        block_table_TM[:num_full],
        positions_T[:num_full],
        config,
        first=1,
    )
    x_BD, positions_B = x_TD[:num_full], positions_T[:num_full]
    x_BD = block(x_BD, module.layer, config, weights.cos_sin, positions_B, attend)
    x_BD = rms_norm(x_BD, module.head_norm_D, config.rms_norm_eps)
    return linear(x_BD, weights.head), x_BD


def _module(weights: ModelWeights) -> MtpWeights:
    if weights.mtp is None:
        raise ValueError("this model was read without its MTP module")
    return weights.mtp


def _combined(weights: ModelWeights, tokens_T: Tensor, hidden_TD: Tensor) -> Tensor:
    """What the module's block takes, [T, D] (eq. 21)."""
    module, eps = _module(weights), weights.config.rms_norm_eps
    embedded_TD = rms_norm(weights.embed.rows(tokens_T), module.enorm_D, eps)
    seen_TD = rms_norm(hidden_TD, module.hnorm_D, eps)
    return linear(torch.cat((embedded_TD, seen_TD), dim=-1), module.eh_proj)

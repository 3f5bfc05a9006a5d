"""Forward pass of one request without blocks, batches or the absorbed form: the oracle of exactness
tests.

Each layer keeps the entries of all positions in one growing tensor, over which every call runs
multi-head attention.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.reference.attention import best_positions, index_scores, mla_prefill
from hadal.reference.layer import IndexQueries, block
from hadal.reference.params import LayerWeights, ModelWeights
from hadal.reference.products import linear, rms_norm


def forward(
    weights: ModelWeights, tokens_T: Tensor, latents: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (logits [T, V], hidden [T, D] after the last norm) of T tokens after the ones in
    `latents`. `latents` has one [S, D] per layer, and is extended by the T tokens; start with
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
    """Append the new entries to `latents[index]` and attend to all entries, or to the indexer's
    selection.
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
    """Return [T, S], True where a position is not selected; None if all visible ones are."""
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
    """Return up to `max_tokens` greedy tokens, ending with the first stop id."""
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

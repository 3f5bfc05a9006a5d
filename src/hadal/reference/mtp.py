"""Multi-token-prediction (MTP) module, which drafts the token after next from hidden states. Two
forms: over one whole text, without cache and batch, and the twin of the fused draft step.

The module's entry at position q is computed from token q and the model's hidden state of position q-1,
or zeros if q begins a block. So a block's entries depend only on its own and earlier tokens. A row at
q drafts token q+1. Position 0 has an entry, computed from zeros and token 0, so that no block has a
gap; the paper's module has none there, so no row attends to it.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, eq. 21-23. T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.reference.attention import SeenEntries
from hadal.reference.decode import paged_core_attention, write_entries
from hadal.reference.forward import core_attention
from hadal.reference.layer import block, queries_and_entry
from hadal.reference.params import ModelWeights, MtpWeights
from hadal.reference.products import linear, rms_norm


def mtp(weights: ModelWeights, hidden_TD: Tensor, next_tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logits [T, V] for token t+2, hidden [T, D] after the module's last norm) from the
    hidden state (after the last norm) of token t and the token t+1. Row 0 is position 0. Raises
    ValueError if the weights were loaded without the module.
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
    """Write each token's entry of the module at its position. Return (logits [num_full, V] for the
    token after, hidden [num_full, D] after the module's last norm) of the first `num_full` rows.
    `hidden_TD`: hidden states of the positions before, zeros at a block's first position.
    """
    module, config, index = _module(weights), weights.config, len(weights.layers)
    x_TD = _combined(weights, tokens_T, hidden_TD)
    normed_TD = rms_norm(x_TD, module.layer.attn_norm_D, config.rms_norm_eps)
    _, _, entries_TD, _ = queries_and_entry(
        normed_TD, module.layer.attention, config, weights.cos_sin, positions_T
    )
    write_entries(SeenEntries(cache_PLSD, index, block_table_TM, positions_T + 1), entries_TD)
    x_BD, positions_B = x_TD[:num_full], positions_T[:num_full]
    seen = SeenEntries(cache_PLSD, index, block_table_TM[:num_full], positions_B + 1, first=1)
    attend = functools.partial(paged_core_attention, module.layer, seen, config)
    x_BD = block(x_BD, module.layer, config, weights.cos_sin, positions_B, attend)
    x_BD = rms_norm(x_BD, module.head_norm_D, config.rms_norm_eps)
    return linear(x_BD, weights.head), x_BD


def _module(weights: ModelWeights) -> MtpWeights:
    if weights.mtp is None:
        raise ValueError("this model was read without its MTP module")
    return weights.mtp


def _combined(weights: ModelWeights, tokens_T: Tensor, hidden_TD: Tensor) -> Tensor:
    """Return the input of the module's block, [T, D] (eq. 21)."""
    module, eps = _module(weights), weights.config.rms_norm_eps
    embedded_TD = rms_norm(weights.embed.rows(tokens_T), module.enorm_D, eps)
    seen_TD = rms_norm(hidden_TD, module.hnorm_D, eps)
    return linear(torch.cat((embedded_TD, seen_TD), dim=-1), module.eh_proj)

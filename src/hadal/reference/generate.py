"""A plain loop for one request: the oracle of every exactness test. No blocks, no batch, no
absorbed form.

Each layer keeps the latents of all positions in one tensor that grows; every step runs the
multi-head form over it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.reference.block import block
from hadal.reference.mla_prefill import mla_prefill
from hadal.reference.params import LayerWeights, ModelWeights
from hadal.reference.rms_norm import rms_norm


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
    hidden_TD = weights.embed_VD[tokens_T]
    for index, layer in enumerate(weights.layers):
        core = functools.partial(attention_core, layer, latents, index, config.softmax_scale)
        hidden_TD = block(hidden_TD, layer, config, weights.cos_sin, positions_T, core)
    hidden_TD = rms_norm(hidden_TD, weights.norm_D, config.rms_norm_eps)
    return F.linear(hidden_TD, weights.head_VD), hidden_TD


def no_latents(weights: ModelWeights) -> list[Tensor]:
    return [weights.embed_VD.new_empty(0, weights.config.latent_dim) for _ in weights.layers]


def attention_core(
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
    attention = layer.attention
    return mla_prefill(
        q_nope_THN, q_rope_THR, latents[index], attention.w_uk_HNC, attention.w_uv_HWC, scale
    )


@torch.inference_mode()
def generate(
    weights: ModelWeights, prompt: Sequence[int], max_tokens: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """Return up to `max_tokens` greedy tokens; a stop id ends them and is the last one."""
    device = weights.embed_VD.device
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

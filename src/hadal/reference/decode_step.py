"""One decode step of the whole model over the paged cache, absorbed form: the twin of the fused
step.

Shapes: B requests, V vocabulary, P blocks, L layers, S block tokens, M blocks of a request, D = C+R
latent.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.reference.block import block
from hadal.reference.mla_decode import mla_decode
from hadal.reference.params import LayerWeights, ModelWeights
from hadal.reference.rms_norm import rms_norm


def decode_step(
    weights: ModelWeights,
    cache_PLSD: Tensor,
    tokens_B: Tensor,
    positions_B: Tensor,
    block_table_BM: Tensor,
) -> Tensor:
    """Write each token's latents at its position, return logits [B, V] for the next one."""
    config = weights.config
    hidden_BD = weights.embed_VD[tokens_B]
    for index, layer in enumerate(weights.layers):
        core = functools.partial(
            _core, layer, cache_PLSD, index, block_table_BM, positions_B, config.softmax_scale
        )
        hidden_BD = block(hidden_BD, layer, config, weights.cos_sin, positions_B, core)
    return F.linear(rms_norm(hidden_BD, weights.norm_D, config.rms_norm_eps), weights.head_VD)


def _core(
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
    q_latent_BHC = torch.einsum("bhn,hnc->bhc", q_nope_BHN, layer.attention.w_uk_HNC)
    o_BHC = mla_decode(
        q_latent_BHC, q_rope_BHR, cache_PLSD, index, block_table_BM, positions_B + 1, scale
    )
    return torch.einsum("bhc,hwc->bhw", o_BHC, layer.attention.w_uv_HWC)

"""The multi-token-prediction module over one whole text: drafts the token after the next. No cache,
no batch.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, eq. 21-23. T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.reference.block import block
from hadal.reference.generate import attention_core
from hadal.reference.params import ModelWeights
from hadal.reference.rms_norm import rms_norm


def mtp(weights: ModelWeights, hidden_TD: Tensor, next_tokens_T: Tensor) -> Tensor:
    """Return logits [T, V] for token t+2 from the hidden state (after the last norm) of token t and
    the token t+1.

    Row 0 is position 0. Raises ValueError if the weights were read without the module.
    """
    config, module = weights.config, weights.mtp
    if module is None:
        raise ValueError("this model was read without its MTP module")
    embedded_TD = rms_norm(weights.embed_VD[next_tokens_T], module.enorm_D, config.rms_norm_eps)
    seen_TD = rms_norm(hidden_TD, module.hnorm_D, config.rms_norm_eps)
    x_TD = F.linear(torch.cat((embedded_TD, seen_TD), dim=-1), module.eh_proj)
    latents = [hidden_TD.new_empty(0, config.latent_dim)]
    core = functools.partial(attention_core, module.layer, latents, 0, config.softmax_scale)
    positions_T = torch.arange(len(x_TD), device=x_TD.device)
    x_TD = block(x_TD, module.layer, config, weights.cos_sin, positions_T, core)
    return F.linear(rms_norm(x_TD, module.head_norm_D, config.rms_norm_eps), weights.head_VD)

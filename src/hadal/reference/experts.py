"""MoE gate and routed experts of a layer in plain torch. Fast twin: `hadal.kernels.experts`.

The gate: sigmoid scores, groups, and a correction bias that affects the choice of experts but never
their weights (DeepSeek-V3, arXiv 2412.19437, eq. 12-16 and section 2.1.2). The experts: the
weighted sum of each token's K experts, computed one expert at a time. Shapes: T tokens, D hidden, E
experts, G groups, K chosen, I expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.reference.params import Experts, Matrix
from hadal.reference.products import linear, swiglu


def gate(
    x_TD: Tensor, router: Matrix, bias_E: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K] FP32) of each token's experts, in unspecified order."""
    scores_TE = linear(x_TD.float(), router).sigmoid()
    biased_TE = scores_TE + bias_E
    if config.n_group > 1:
        biased_TGe = biased_TE.view(len(x_TD), config.n_group, -1)
        group_score_TG = biased_TGe.topk(2, dim=-1).values.sum(-1)
        kept = group_score_TG.topk(config.topk_group, dim=-1, sorted=False).indices
        dropped_TG = torch.ones_like(group_score_TG, dtype=torch.bool).scatter_(-1, kept, False)
        # Masked with -inf, not with 0: a bias may make every kept score negative.
        biased_TE = biased_TGe.masked_fill(dropped_TG[..., None], float("-inf")).flatten(-2)
    ids_TK = biased_TE.topk(config.num_experts_per_tok, dim=-1, sorted=False).indices
    weights_TK = scores_TE.gather(-1, ids_TK)
    if config.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * config.routed_scaling_factor


def experts(x_TD: Tensor, held: Experts, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return y [T, D]: y[t] = sum over k of weights[t, k] * expert(ids[t, k])(x[t]). Raises
    IndexError if `held` lacks an id's expert.
    """
    y_TD = torch.zeros_like(x_TD)
    for expert in sorted(set(ids_TK.flatten().tolist())):
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        out = swiglu(x_TD[token], held[expert])
        y_TD.index_add_(0, token, out * weights_TK[token, choice, None].to(out.dtype))
    return y_TD

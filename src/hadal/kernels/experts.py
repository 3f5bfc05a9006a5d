"""MoE gate and routed SwiGLU experts on a CPU: tokens sorted by expert, one grouped product per
projection.

Deterministic: a token's result is bit-equal for any batch and number of threads, because its
experts are added by ascending id. The gate does not depend on expert weights, nor the experts on
the gate.

Each op has a slow twin of the same name in `hadal.reference.experts`, which runs where the kernels
cannot (a GPU, no compiler). Shapes: T tokens, D hidden, K chosen, E experts, I expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.kernels import library
from hadal.kernels.products import linear
from hadal.kernels.weights import address, takes
from hadal.reference import experts as twin
from hadal.reference.params import Experts, Matrix


def gate(
    x_TD: Tensor, router: Matrix, bias_E: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K] FP32) of each token's experts, in unspecified order."""
    lib = library.load()
    if lib is None or not library.fits(x_TD, bias_E) or not takes(router):
        return twin.gate(x_TD, router, bias_E, config)
    num_tokens, num_experts, num_chosen = (
        len(x_TD),
        config.n_routed_experts,
        config.num_experts_per_tok,
    )
    logits_TE = linear(x_TD, router)
    library.check_shape("logits_TE", logits_TE, (num_tokens, num_experts))
    library.check_shape("bias_E", bias_E, (num_experts,))
    ids_TK = torch.empty((num_tokens, num_chosen), dtype=torch.int64)
    weights_TK = torch.empty((num_tokens, num_chosen))
    library.check_status(
        lib.hadal_gate(
            library.team(),
            logits_TE.data_ptr(),
            num_tokens,
            num_experts,
            bias_E.data_ptr(),
            num_chosen,
            config.n_group,
            config.topk_group,
            int(config.norm_topk_prob),
            config.routed_scaling_factor,
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
        )
    )
    return ids_TK, weights_TK


def experts(x_TD: Tensor, held: Experts, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return y [T, D] = sum over k of weights[t, k] * expert(ids[t, k])(x[t]). All experts have one
    shape. Raises ValueError if shapes do not match or `held` lacks an id's expert.
    """
    lib = library.load()
    if lib is None or not library.fits(x_TD, weights_TK) or not takes(held):
        return twin.experts(x_TD, held, ids_TK, weights_TK)
    num_tokens, dim = x_TD.shape
    top_k, (width, held_dim) = ids_TK.shape[-1], held.shape
    if width and held_dim != dim:
        raise ValueError(f"tokens have {dim} values, and an expert's gate takes {held_dim}.")
    library.check_shape("ids_TK", ids_TK, (num_tokens, top_k))
    library.check_shape("weights_TK", weights_TK, (num_tokens, top_k))
    ids_TK = library.as_int(ids_TK, torch.int64)
    y_TD = torch.empty((num_tokens, dim))
    library.check_status(
        lib.hadal_experts(
            library.team(),
            x_TD.data_ptr(),
            num_tokens,
            dim,
            address(held),
            len(held),
            max(width, 1),
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            top_k,
            y_TD.data_ptr(),
        )
    )
    return y_TD

"""The routed SwiGLU experts of a layer: tokens sorted by expert, one grouped product per
projection. Knows nothing of gates.

Deterministic: a token's result is bit-equal whatever the batch and the number of threads (its
experts are added by ascending id). Shapes: T tokens, D hidden, K chosen, E experts, I expert width.
Twin: `hadal.reference.experts`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.kernels import library
from hadal.reference import experts as twin


def experts(
    x_TD: Tensor, gate_up_E: Tensor, down_E: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return y [T, D] = sum over k of weights[t, k] * expert(ids[t, k])(x[t]); gate_up_E [E, 2I,
    D], down_E [E, D, I].

    Raises ValueError if shapes do not match or an id is out of range.
    """
    lib = library.load()
    if lib is None or not library.fits(x_TD, gate_up_E, down_E, weights_TK):
        return twin.experts(x_TD, gate_up_E, down_E, ids_TK, weights_TK)
    num_tokens, dim = x_TD.shape
    num_experts, _, width = down_E.shape
    top_k = ids_TK.shape[-1]
    library.check_shape("gate_up_E", gate_up_E, (num_experts, 2 * width, dim))
    library.check_shape("down_E", down_E, (num_experts, dim, width))
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
            gate_up_E.data_ptr(),
            down_E.data_ptr(),
            num_experts,
            width,
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            top_k,
            y_TD.data_ptr(),
        )
    )
    return y_TD

"""The MoE gate: which experts a token goes to. Knows no expert's weights. Twin: reference.gate.

T tokens, D hidden, E experts, K chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.kernels import library
from hadal.kernels.linear import linear
from hadal.reference import gate as twin


def gate(
    x_TD: Tensor, router_ED: Tensor, bias_E: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K] FP32) of the experts each token goes to, in no
    promised order.
    """
    lib = library.load()
    if lib is None or not library.fits(x_TD, router_ED, bias_E):
        return twin.gate(x_TD, router_ED, bias_E, config)
    num_tokens, num_experts, num_chosen = (
        len(x_TD),
        config.n_routed_experts,
        config.num_experts_per_tok,
    )
    logits_TE = linear(x_TD, router_ED)
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

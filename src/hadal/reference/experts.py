"""The routed experts: every token through its K experts, summed with the gate's weights. One expert
at a time.

Shapes: T tokens, D hidden, K chosen, E experts, I expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.reference.params import MlpWeights
from hadal.reference.swiglu import swiglu


def experts(
    x_TD: Tensor, gate_up_E: Tensor, down_E: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return y [T, D]: y[t] = sum over k of weights[t, k] * expert(ids[t, k])(x[t]). Shapes as in
    MoeWeights.
    """
    y_TD = torch.zeros_like(x_TD)
    for expert in sorted(set(ids_TK.flatten().tolist())):
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        out = swiglu(x_TD[token], MlpWeights(gate_up_E[expert], down_E[expert]))
        y_TD.index_add_(0, token, out * weights_TK[token, choice, None].to(out.dtype))
    return y_TD

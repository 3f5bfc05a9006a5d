"""A dense network, or the shared expert: SwiGLU over the fast `linear`. Twin: reference.swiglu."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hadal.kernels.linear import linear
from hadal.reference.params import MlpWeights


def swiglu(x_TD: Tensor, mlp: MlpWeights) -> Tensor:
    """Return down(silu(gate x) * up x), [T, D]."""
    gate_TF, up_TF = linear(x_TD, mlp.gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate_TF) * up_TF, mlp.down)

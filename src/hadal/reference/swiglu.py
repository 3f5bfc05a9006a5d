"""SwiGLU, the feed-forward network: down(silu(gate x) * up x) (arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hadal.reference.params import MlpWeights


def swiglu(x_TD: Tensor, mlp: MlpWeights) -> Tensor:
    """Apply a dense or shared network to [T, D]."""
    gate, up = F.linear(x_TD, mlp.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, mlp.down)

"""RMSNorm: x / rms(x) * weight. Knows nothing of what it normalises."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension, in FP32 whatever the input (arXiv 1910.07467, eq. 4)."""
    x32 = x_TD.float()
    mean_square = x32.pow(2).mean(-1, keepdim=True)
    return weight_D * (x32 * torch.rsqrt(mean_square + eps)).to(x_TD.dtype)

"""Products of every head with a matrix of its own: what MLA's absorbed form does before and behind
its core.

Shapes: B rows, H heads, N plain key dims, C latent, W value dims.
"""

from __future__ import annotations

import torch
from torch import Tensor


def heads_in(q_BHN: Tensor, w_uk_HNC: Tensor) -> Tensor:
    """W_UK into the query: [B, H, C]."""
    return torch.matmul(q_BHN.transpose(0, 1), w_uk_HNC).transpose(0, 1).contiguous()


def heads_out(o_BHC: Tensor, w_uv_HWC: Tensor) -> Tensor:
    """W_UV behind the sum: [B, H, W]."""
    return (
        torch.matmul(o_BHC.transpose(0, 1), w_uv_HWC.transpose(1, 2)).transpose(0, 1).contiguous()
    )

"""Products with weights in plain torch: y = x W^T; SwiGLU, the feed-forward network (arXiv
2002.05202); products of each head with its own matrix, before and after MLA's absorbed core
attention; and the RMS norm. Fast twin: `hadal.kernels.products`.

Shapes: B rows, H heads, N plain key dims, C latent, W value dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.row_bytes import row_bytes
from hadal.reference import codec
from hadal.reference.params import Matrix, MlpWeights


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension, always in FP32 (arXiv 1910.07467, eq. 4)."""
    x32 = x_TD.float()
    mean_square = x32.pow(2).mean(-1, keepdim=True)
    return weight_D * (x32 * torch.rsqrt(mean_square + eps)).to(x_TD.dtype)


def linear(x_MK: Tensor, w: Matrix) -> Tensor:
    """Return y [M, N] (or [..., N] for x of more dimensions) for w [N, K]."""
    if w.is_rounding_inputs:
        x_MK = rounded(x_MK)
    return F.linear(x_MK, w.dense(x_MK.dtype))


def rounded(x_MK: Tensor) -> Tensor:
    """Return x with each 128 values of a row rounded to E4M3 with a common scale."""
    flat_MK = x_MK.reshape(-1, x_MK.shape[-1]).float()
    rows_MB = torch.empty(
        (len(flat_MK), row_bytes(flat_MK.shape[1], "fp8")), dtype=torch.uint8, device=x_MK.device
    )
    out_MK = torch.empty_like(flat_MK)
    codec.encode(flat_MK, None, rows_MB, "fp8")
    codec.decode(rows_MB, out_MK, "fp8")
    return out_MK.view(x_MK.shape).to(x_MK.dtype)


def swiglu(x_TD: Tensor, mlp: MlpWeights) -> Tensor:
    """Return down(silu(gate x) * up x), [T, D]."""
    return linear(F.silu(linear(x_TD, mlp.gate)) * linear(x_TD, mlp.up), mlp.down)


def heads_in(q_BHN: Tensor, kv_b: Matrix) -> Tensor:
    """Return W_UK applied to the query: [B, H, C]. Rows of `kv_b` as in AttentionWeights."""
    w_uk_HNC = _by_head(kv_b, q_BHN)[:, : q_BHN.shape[-1]]
    return torch.matmul(q_BHN.transpose(0, 1), w_uk_HNC).transpose(0, 1).contiguous()


def heads_out(o_BHC: Tensor, kv_b: Matrix, num_values: int) -> Tensor:
    """Return W_UV applied to the latent sum: [B, H, W]. Rows of `kv_b` as in AttentionWeights; the
    last W rows of a head are W_UV.
    """
    w_uv_HWC = _by_head(kv_b, o_BHC)[:, -num_values:]
    return (
        torch.matmul(o_BHC.transpose(0, 1), w_uv_HWC.transpose(1, 2)).transpose(0, 1).contiguous()
    )


def _by_head(kv_b: Matrix, x_BHK: Tensor) -> Tensor:
    """Return the matrix split by head, [H, N + W, C]."""
    return kv_b.dense(x_BHK.dtype).view(x_BHK.shape[1], -1, kv_b.shape[1])

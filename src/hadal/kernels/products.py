"""Products with weights on a CPU: y = x W^T for any number of tokens, SwiGLU, the products of each
head with its own matrix around MLA's absorbed core attention, and the RMS norm.

A row's result is bit-equal for any other rows and any number of threads. torch's own products do
not promise that, and under FP8 dispatch a difference in the last bit can round an activation to
another code. Independent of models.

Each op has a slow twin of the same name in `hadal.reference.products`, which runs where the kernels
cannot (a GPU, no compiler). Shapes: M tokens, K inputs, N outputs; B rows, H heads, N plain key
dims, C latent, W value dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.kernels import library
from hadal.kernels.weights import address, takes
from hadal.reference import products as twin
from hadal.reference.params import Matrix, MlpWeights


def linear(x_MK: Tensor, w: Matrix) -> Tensor:
    """Return y [M, N] (or [..., N] for x of more dimensions) for w [N, K]. Raises ValueError if the
    shapes do not match.
    """
    lib = library.load()
    if lib is None or not library.fits(x_MK) or not takes(w):
        return twin.linear(x_MK, w)
    if x_MK.dim() < 1 or x_MK.shape[-1] != w.shape[1]:
        raise ValueError(
            f"x {list(x_MK.shape)} and w {list(w.shape)} do not fit; [M, K] and [N, K] are needed."
        )
    n, k = w.shape
    m = x_MK.numel() // k
    y_MN = torch.empty((*x_MK.shape[:-1], n))
    library.check_status(
        lib.hadal_linear(library.team(), x_MK.data_ptr(), m, k, address(w), n, y_MN.data_ptr())
    )
    return y_MN


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps), [T, D]. Raises ValueError if the shapes do not
    match.
    """
    lib = library.load()
    if lib is None or not library.fits(x_TD, weight_D):
        return F.rms_norm(x_TD, x_TD.shape[-1:], weight_D, eps)
    library.check_shape("weight_D", weight_D, (x_TD.shape[-1],))
    y_TD = torch.empty_like(x_TD)
    dim = x_TD.shape[-1]
    library.check_status(
        lib.hadal_rms_norm(
            library.team(),
            x_TD.data_ptr(),
            x_TD.numel() // dim,
            dim,
            weight_D.data_ptr(),
            eps,
            y_TD.data_ptr(),
        )
    )
    return y_TD


def swiglu(x_TD: Tensor, mlp: MlpWeights) -> Tensor:
    """Return down(silu(gate x) * up x), [T, D]."""
    return linear(F.silu(linear(x_TD, mlp.gate)) * linear(x_TD, mlp.up), mlp.down)


def heads_in(q_BHN: Tensor, kv_b: Matrix) -> Tensor:
    """Return W_UK applied to the query: [B, H, C]. Rows of `kv_b` as in AttentionWeights. The query
    may be a view with a dense last dimension. Raises ValueError if the shapes do not match.
    """
    lib = library.load()
    is_plain = q_BHN.dtype is torch.float32 and q_BHN.device.type == "cpu" and q_BHN.stride(-1) == 1
    if lib is None or not is_plain or not takes(kv_b):
        return twin.heads_in(q_BHN, kv_b)
    batch, heads, n = q_BHN.shape
    c, apart = kv_b.shape[1], _rows_apart(kv_b, heads, n)
    y_BHC = torch.empty((batch, heads, c))
    library.check_status(
        lib.hadal_heads_in(
            library.team(),
            q_BHN.data_ptr(),
            q_BHN.stride(0),
            q_BHN.stride(1),
            batch,
            heads,
            n,
            address(kv_b),
            0,
            apart,
            c,
            y_BHC.data_ptr(),
        )
    )
    return y_BHC


def heads_out(o_BHC: Tensor, kv_b: Matrix, num_values: int) -> Tensor:
    """Return W_UV applied to the latent sum: [B, H, W]. Rows of `kv_b` as in AttentionWeights; the
    last W rows of a head are W_UV. Raises ValueError if the shapes do not match.
    """
    lib = library.load()
    if lib is None or not library.fits(o_BHC) or not takes(kv_b):
        return twin.heads_out(o_BHC, kv_b, num_values)
    batch, heads, c = o_BHC.shape
    apart = _rows_apart(kv_b, heads, num_values)
    library.check_shape("kv_b", kv_b, (heads * apart, c))
    y_BHW = torch.empty((batch, heads, num_values))
    library.check_status(
        lib.hadal_heads_out(
            library.team(),
            o_BHC.data_ptr(),
            batch,
            heads,
            c,
            address(kv_b),
            apart - num_values,
            apart,
            num_values,
            y_BHW.data_ptr(),
        )
    )
    return y_BHW


def _rows_apart(kv_b: Matrix, num_heads: int, num_rows: int) -> int:
    """Return the rows per head. Raises ValueError if that is no integer or below `num_rows`."""
    apart = kv_b.shape[0] // num_heads
    if apart * num_heads != kv_b.shape[0] or apart < num_rows:
        raise ValueError(
            f"kv_b has {kv_b.shape[0]} rows: too few, or uneven for {num_heads} heads."
        )
    return apart

"""Products of every head with a matrix of its own, around MLA's absorbed core. Twin:
`hadal.reference.heads`.

A row's result is bit-equal whatever the other rows and the number of threads; torch's batched
product does not promise that, and a difference in the last bit is enough to round an activation
otherwise on an FP8 wire. Shapes: B rows, H heads, N plain key dims, C latent, W value dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.kernels import library
from hadal.reference import heads as twin


def heads_in(q_BHN: Tensor, w_uk_HNC: Tensor) -> Tensor:
    """W_UK into the query: [B, H, C]. The query may be a view whose last dimension is dense.

    Raises ValueError if the shapes do not match.
    """
    lib = library.load()
    is_plain = q_BHN.dtype is torch.float32 and q_BHN.device.type == "cpu" and q_BHN.stride(-1) == 1
    if lib is None or not is_plain or not library.fits(w_uk_HNC):
        return twin.heads_in(q_BHN, w_uk_HNC)
    batch, heads, n = q_BHN.shape
    c = w_uk_HNC.shape[-1]
    library.check_shape("w_uk_HNC", w_uk_HNC, (heads, n, c))
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
            w_uk_HNC.data_ptr(),
            c,
            y_BHC.data_ptr(),
        )
    )
    return y_BHC


def heads_out(o_BHC: Tensor, w_uv_HWC: Tensor) -> Tensor:
    """W_UV behind the sum: [B, H, W]. Raises ValueError if the shapes do not match."""
    lib = library.load()
    if lib is None or not library.fits(o_BHC, w_uv_HWC):
        return twin.heads_out(o_BHC, w_uv_HWC)
    batch, heads, c = o_BHC.shape
    width = w_uv_HWC.shape[1]
    library.check_shape("w_uv_HWC", w_uv_HWC, (heads, width, c))
    y_BHW = torch.empty((batch, heads, width))
    library.check_status(
        lib.hadal_heads_out(
            library.team(),
            o_BHC.data_ptr(),
            batch,
            heads,
            c,
            w_uv_HWC.data_ptr(),
            width,
            y_BHW.data_ptr(),
        )
    )
    return y_BHW

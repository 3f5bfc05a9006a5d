"""y = x W^T for few tokens or many. Knows nothing of models. Twin: torch's `F.linear`.

A token's result is bit-equal whatever the other tokens and the number of threads; `F.linear` does
not promise that. Shapes: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.kernels import library


def linear(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """Return y [M, N] (or [..., N] for x of more dimensions); plain torch where the kernels cannot
    run.

    Raises ValueError if the shapes do not match.
    """
    lib = library.load()
    if lib is None or not library.fits(x_MK, w_NK):
        return F.linear(x_MK, w_NK)
    if x_MK.dim() < 1 or w_NK.dim() != 2 or x_MK.shape[-1] != w_NK.shape[1]:
        raise ValueError(
            f"x {list(x_MK.shape)} and w {list(w_NK.shape)} do not multiply; [M, K] and [N, K] do."
        )
    n, k = w_NK.shape
    m = x_MK.numel() // k
    y_MN = torch.empty((*x_MK.shape[:-1], n))
    library.check_status(
        lib.hadal_linear(library.team(), x_MK.data_ptr(), m, k, w_NK.data_ptr(), n, y_MN.data_ptr())
    )
    return y_MN

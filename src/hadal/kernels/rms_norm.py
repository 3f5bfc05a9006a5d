"""RMS norm over the last dimension. Twin: torch's `F.rms_norm`, which reference.rms_norm spells
out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.kernels import library


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

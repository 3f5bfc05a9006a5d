"""Rotation of interleaved pairs with the tokens' cos and sin looked up before, once per batch
instead of per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Rotate x [T, R] or [T, H, R]; cos_sin holds cos of the R/2 pairs, then sin. The twin is
    reference.rope.rotate.
    """
    cos, sin = (cos_sin_TR if x.dim() == 2 else cos_sin_TR[:, None]).chunk(2, dim=-1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return (
        torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        .flatten(-2)
        .to(x.dtype)
    )


def rotate_halves(x: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Rotate the first R values of x [T, X] or [T, J, X], whose pairs are (x[i], x[R/2 + i])."""
    cos, sin = (cos_sin_TR if x.dim() == 2 else cos_sin_TR[:, None]).chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*(part.to(x.dtype) for part in rotated), rest), dim=-1)

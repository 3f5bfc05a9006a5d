"""Rotary positions with YaRN's stretched frequencies, on interleaved pairs. Independent of
attention. Sources: RoPE arXiv 2104.09864; YaRN arXiv 2309.00071, section 3.2 (NTK-by-parts) and 3.4
(temperature). Shapes: T tokens, H heads, R rotated dims (R/2 pairs).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.core.rope import RopeScaling


def cos_sin_table(config: ModelConfig) -> Tensor:
    """Return [max_position, R]: cos of the R/2 pairs' angles, then sin, in FP32."""
    dim = config.qk_rope_head_dim
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    temperature = 1.0
    if config.rope_scaling is not None:
        frequency = _stretch(frequency, config.rope_scaling, config.rope_theta)
        temperature = config.rope_scaling.temperature
    # In FP32, because the model was trained with angles rounded like this.
    angle = torch.outer(
        torch.arange(config.max_position_embeddings, dtype=torch.float32), frequency
    )
    return torch.cat((angle.cos(), angle.sin()), dim=-1) * temperature


def _stretch(frequency: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Divide slow pairs' frequencies by the factor, keep those of fast pairs; a ramp between."""
    dim = 2 * len(frequency)

    def pair_with(rotations: float) -> float:
        """Return the (fractional) index of the pair that turns this often in the original context."""
        wavelength = scaling.original_max_position_embeddings / rotations
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequency / scaling.factor * interpolated + frequency * (1 - interpolated)


def rotate_halves(x: Tensor, cos_sin: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate the first R values of x [T, X] or [T, J, X]; a pair is (x[i], x[R/2 + i]), as in the
    indexer.
    """
    cos, sin = cos_sin[positions_T].chunk(2, dim=-1)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotate(x: Tensor, cos_sin: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate the pairs (x0, x1), (x2, x3) ... of x [T, R] or [T, H, R] and leave them interleaved."""
    cos, sin = cos_sin[positions_T].chunk(2, dim=-1)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return (
        torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        .flatten(-2)
        .to(x.dtype)
    )

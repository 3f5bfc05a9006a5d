"""Block-scaled FP8 weights: E4M3 codes with one FP32 scale per 128x128 block; the last blocks may
be smaller.

Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, and README_WEIGHTS of the release: W = code *
scale_inv.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E4M3_MAX = 448.0


def e4m3_to_f32(codes: Tensor) -> Tensor:
    """Return the exact values of E4M3 codes by table look-up, in half the time of the cast. The two
    NaN codes give +-480; a checkpoint has none, because its quantiser saturates.
    """
    values = e4m3_values(codes.device)
    return values.index_select(0, codes.view(torch.uint8).int().flatten()).view(codes.shape)


@functools.cache
def e4m3_values(device: torch.device) -> Tensor:
    """Return the value of each code, FP32 [256], on this device; one tensor shared by all callers.
    Shifted left by 7, a code's bits are an FP16 number that is 2^8 times smaller than its value.
    """
    bits = torch.arange(256, dtype=torch.int16, device=device)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).view(torch.float16).float() * 256.0


def num_scales(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return (row blocks, column blocks) of a matrix of this shape."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def dequantise(codes: Tensor, scale_inv: Tensor, block: tuple[int, int], out: Tensor) -> None:
    """Fill `out` [..., rows, columns] with codes * scale_inv [..., row blocks, column blocks], a
    row of blocks at a time, so that no whole copy is made.
    """
    rows, columns = codes.shape[-2:]
    for band in range(scale_inv.shape[-2]):
        part = slice(band * block[0], min((band + 1) * block[0], rows))
        scales = scale_inv[..., band, None, :].float().repeat_interleave(block[1], dim=-1)
        out[..., part, :].copy_(e4m3_to_f32(codes[..., part, :]) * scales[..., :columns])


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (codes, scale_inv) of [rows, columns]: a block's largest magnitude, if at least 1e-4,
    becomes 448.
    """
    rows, columns = weight.shape
    bands, stripes = num_scales((rows, columns), block)
    padded = torch.zeros(bands * block[0], stripes * block[1], device=weight.device)
    padded[:rows, :columns] = weight
    blocks = padded.view(bands, block[0], stripes, block[1])
    scale_inv = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-4) / E4M3_MAX
    # Clamp, because on some devices a cast of larger values gives NaN.
    codes = (
        (blocks / scale_inv[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    )
    return codes.view_as(padded)[:rows, :columns].contiguous(), scale_inv

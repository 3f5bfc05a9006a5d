"""Block-scaled FP8 weights: E4M3 codes with one FP32 scale per 128x128 block, the last blocks
ragged.

Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, and README_WEIGHTS of the release: W = code *
scale_inv.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0


def e4m3_to_f32(codes: Tensor) -> Tensor:
    """Exact for the 254 finite codes, several times faster than the cast: the bits are an FP16's,
    2^8 too small.

    The two NaN codes give +-480; a checkpoint has none, its quantiser saturates.
    """
    bits = codes.view(torch.uint8).to(torch.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).view(torch.float16).float() * 256.0


def num_scales(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a matrix of this shape."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def dequantise(codes: Tensor, scale_inv: Tensor, block: tuple[int, int], out: Tensor) -> None:
    """Fill `out` [rows, columns] with codes * scale_inv; a band of blocks at a time, so that no
    copy is made.
    """
    rows, columns = codes.shape
    for band in range(scale_inv.shape[0]):
        part = slice(band * block[0], min((band + 1) * block[0], rows))
        scale_row = scale_inv[band].float().repeat_interleave(block[1])[:columns]
        out[part].copy_(e4m3_to_f32(codes[part]) * scale_row)


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (codes, scale_inv) of [rows, columns]: a block's largest magnitude becomes 448."""
    rows, columns = weight.shape
    bands, stripes = num_scales((rows, columns), block)
    padded = torch.zeros(bands * block[0], stripes * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(bands, block[0], stripes, block[1])
    scale_inv = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-4) / E4M3_MAX
    # Clamped because a cast beyond the range gives NaN on some devices.
    codes = (
        (blocks / scale_inv[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    )
    return codes.view_as(padded)[:rows, :columns].contiguous(), scale_inv

"""Rows in messages between ranks, in plain torch: encode, decode, and the weighted sum of returned
rows.

Independent of ranks and messages. Formats: "fp32"; "bf16"; "fp8": E4M3 codes padded with zeros to a
multiple of 4, then one FP32 scale per 128 channels (the last group may be smaller), scale =
max(amax, 1e-4) / 448; "fp8_pow2": the scale rounded up to a power of two (DeepSeek-V3, arXiv
2412.19437, 3.3.3). Fast twin: `hadal.kernels.codec`, bit-equal.

Shapes: T tokens, D hidden, N rows, B bytes of a row, P returned rows, K rows of a token, G groups
of 128 channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.row_bytes import SCALE_GROUP, codes_bytes
from hadal.reference.fp8 import E4M3_MAX, e4m3_to_f32

MIN_AMAX = 1e-4
_MANTISSA = 0x7FFFFF
"""Mantissa bits of an FP32 value."""


def encode(x_TD: Tensor, index_N: Tensor | None, rows_NB: Tensor, row_format: str) -> None:
    """Encode the rows `index_N` of x_TD (None: all in order) into rows_NB (uint8; gaps between rows
    are allowed).
    """
    picked_ND = x_TD if index_N is None else x_TD[index_N.long()]
    hidden = x_TD.shape[1]
    if row_format in ("fp32", "bf16"):
        dtype = torch.float32 if row_format == "fp32" else torch.bfloat16
        rows_NB[:, : hidden * dtype.itemsize].copy_(
            picked_ND.to(dtype).contiguous().view(torch.uint8)
        )
        return
    num_groups = -(-hidden // SCALE_GROUP)
    groups_NGC = F.pad(picked_ND, (0, num_groups * SCALE_GROUP - hidden)).view(
        -1, num_groups, SCALE_GROUP
    )
    # Divide by a tensor: a device may replace division by a constant with multiplication by its
    # inverse.
    scale_NG = groups_NGC.abs().amax(dim=2).clamp(min=MIN_AMAX) / torch.full(
        (), E4M3_MAX, device=x_TD.device
    )
    if row_format == "fp8_pow2":
        # Add so that any set mantissa bit carries into the exponent, then clear the mantissa.
        power = ((scale_NG.view(torch.int32) + _MANTISSA) & ~_MANTISSA).view(torch.float32)
        scale_NG = torch.where(scale_NG.isfinite(), power, scale_NG)
    # Clamp, because on some devices a cast of larger values gives NaN.
    codes_NGC = (
        (groups_NGC / scale_NG[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    )
    end = codes_bytes(hidden)
    rows_NB[:, :hidden].copy_(codes_NGC.view(torch.uint8).flatten(1)[:, :hidden])
    rows_NB[:, hidden:end].zero_()
    rows_NB[:, end : end + 4 * num_groups].copy_(_dense(scale_NG).view(torch.uint8))


def decode(rows_NB: Tensor, out_ND: Tensor, row_format: str) -> None:
    """Fill out_ND (FP32) from rows written by `encode`."""
    hidden = out_ND.shape[1]
    if row_format in ("fp32", "bf16"):
        dtype = torch.float32 if row_format == "fp32" else torch.bfloat16
        out_ND.copy_(_dense(rows_NB[:, : hidden * dtype.itemsize]).view(dtype))
        return
    num_groups, end = -(-hidden // SCALE_GROUP), codes_bytes(hidden)
    scale_NG = _dense(rows_NB[:, end : end + 4 * num_groups]).view(torch.float32)
    scale_ND = scale_NG.repeat_interleave(SCALE_GROUP, dim=1)[:, :hidden]
    out_ND.copy_(e4m3_to_f32(_dense(rows_NB[:, :hidden])) * scale_ND)


def weighted_sum(
    rows_PB: Tensor,
    row_format: str,
    at_TK: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    out_TD: Tensor,
) -> None:
    """Set out[t] = sum over k of weights[t, k] * row at[t, k], by ascending id, one fused
    multiply-add each.
    """
    dtype = torch.float32 if row_format == "fp32" else torch.bfloat16
    rows_PD = _dense(rows_PB[:, : out_TD.shape[1] * dtype.itemsize]).view(dtype)
    order_TK = ids_TK.argsort(dim=1, stable=True)
    at_TK, weights_TK = at_TK.long().gather(1, order_TK), weights_TK.gather(1, order_TK)
    out_TD.zero_()
    for k in range(ids_TK.shape[1]):
        out_TD.copy_(_fma(rows_PD[at_TK[:, k]].float(), weights_TK[:, k, None], out_TD))


def _dense(rows_NB: Tensor) -> Tensor:
    """Return a contiguous, aligned copy: received bytes may lie at any address."""
    return rows_NB.clone(memory_format=torch.contiguous_format)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c with one rounding, as the kernels compute it. The product of two FP32 is
    exact in FP64. Its sum with c is rounded to odd (Boldo, Melquiond 2008), so that rounding it
    again to FP32 equals a single rounding.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # Rounding error of the addition (Knuth's two-sum).
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    toward_zero = (lost < 0) != (total < 0)
    odd = torch.where(toward_zero, bits - 1, bits) | 1
    # For an inexact sum with an even last bit, the neighbour on the other side of the exact value
    # is odd.
    is_inexact = (lost != 0) & total.isfinite()
    return torch.where(is_inexact & (bits & 1 == 0), odd, bits).view(torch.float64).float()

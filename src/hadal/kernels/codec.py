"""Rows in messages between ranks: encode with gather, decode, and the weighted sum of returned
rows.

Bit-equal to the twin `hadal.reference.codec`, which runs where the kernels cannot (a GPU, no
compiler) and defines the formats. Rows are views of a message, so no extra copy is made.

Shapes: T tokens, D hidden, N rows, B bytes of a row, P returned rows, K rows of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.core.row_bytes import row_bytes
from hadal.kernels import library
from hadal.reference import codec as codec_twin

FORMATS = {"fp32": 0, "fp8": 1, "fp8_pow2": 2, "bf16": 3}
MAX_TOP_K = 64


def encode(x_TD: Tensor, index_N: Tensor | None, rows_NB: Tensor, row_format: str) -> None:
    """Encode the rows `index_N` (int32) of x_TD (None: all in order) into rows_NB (uint8; gaps
    between rows are allowed). Raises ValueError if shapes do not match or an index is out of range.
    """
    num_tokens, hidden = x_TD.shape
    num_rows = num_tokens if index_N is None else index_N.shape[0]
    _check_rows(rows_NB, num_rows, row_bytes(hidden, row_format))
    lib = library.load()
    if lib is None or not library.fits(x_TD) or rows_NB.device.type != "cpu":
        codec_twin.encode(x_TD, index_N, rows_NB, row_format)
        return
    index_N = None if index_N is None else library.as_int(index_N, torch.int32)
    library.check_status(
        lib.hadal_encode(
            library.team(),
            x_TD.data_ptr(),
            num_tokens,
            hidden,
            None if index_N is None else index_N.data_ptr(),
            num_rows,
            FORMATS[row_format],
            rows_NB.data_ptr(),
            rows_NB.stride(0),
        )
    )


def decode(rows_NB: Tensor, out_ND: Tensor, row_format: str) -> None:
    """Fill out_ND (FP32) from rows written by `encode`. Raises ValueError if shapes do not match."""
    num_rows, hidden = out_ND.shape
    _check_rows(rows_NB, num_rows, row_bytes(hidden, row_format))
    lib = library.load()
    if lib is None or not library.fits(out_ND) or rows_NB.device.type != "cpu":
        codec_twin.decode(rows_NB, out_ND, row_format)
        return
    library.check_status(
        lib.hadal_decode(
            library.team(),
            rows_NB.data_ptr(),
            rows_NB.stride(0),
            num_rows,
            hidden,
            FORMATS[row_format],
            out_ND.data_ptr(),
        )
    )


def weighted_sum(
    rows_PB: Tensor,
    row_format: str,
    at_TK: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    out_TD: Tensor,
) -> None:
    """Set out[t] = sum over k of weights[t, k] * row at[t, k], by ascending id, one fused
    multiply-add each. `row_format`: "fp32" or "bf16"; rows_PB without gaps. Raises ValueError for
    another format, more than MAX_TOP_K rows of a token, or shapes that do not match.
    """
    num_tokens, hidden = out_TD.shape
    num_rows, top_k = rows_PB.shape[0], ids_TK.shape[1]
    if row_format not in ("fp32", "bf16") or top_k > MAX_TOP_K:
        raise ValueError(f"rows in {row_format}, {top_k} per token, cannot be summed.")
    library.check_shape("rows_PB", rows_PB, (num_rows, row_bytes(hidden, row_format)))
    for name, tensor in (("at_TK", at_TK), ("ids_TK", ids_TK), ("weights_TK", weights_TK)):
        library.check_shape(name, tensor, (num_tokens, top_k))
    lib = library.load()
    if lib is None or not library.fits(weights_TK, out_TD) or not rows_PB.is_contiguous():
        codec_twin.weighted_sum(rows_PB, row_format, at_TK, ids_TK, weights_TK, out_TD)
        return
    at_TK, ids_TK = library.as_int(at_TK, torch.int32), library.as_int(ids_TK, torch.int64)
    library.check_status(
        lib.hadal_weighted_sum(
            library.team(),
            rows_PB.data_ptr(),
            num_rows,
            hidden,
            int(row_format == "bf16"),
            at_TK.data_ptr(),
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            num_tokens,
            top_k,
            out_TD.data_ptr(),
        )
    )


def _check_rows(rows_NB: Tensor, num_rows: int, num_bytes: int) -> None:
    library.check_shape("rows_NB", rows_NB, (num_rows, num_bytes))
    if rows_NB.dtype is not torch.uint8 or (num_rows and rows_NB.stride(1) != 1):
        raise ValueError("rows_NB must be uint8, and each row's bytes contiguous.")

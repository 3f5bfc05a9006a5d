"""Rows as they travel between ranks: encode with gather, decode, and the weighted sum of what came
back.

Bit-equal to its twin `hadal.reference.codec`, which runs where the kernels cannot (a GPU, no
compiler) and tells the formats. Rows are views of a message, so nothing is copied on the way.

Shapes: T tokens, D hidden, N rows, B bytes of a row, P rows that came back, K of a token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hadal.core.plans import row_bytes
from hadal.kernels import library
from hadal.reference import codec as twin
from hadal.reference.ops import Route

FORMATS = {"fp32": 0, "fp8": 1, "fp8_pow2": 2, "bf16": 3}
MAX_TOP_K = 64


def encode(x_TD: Tensor, index_N: Tensor | None, rows_NB: Tensor, wire_format: str) -> None:
    """Fill rows_NB (uint8, rows may lie apart) with the rows `index_N` (int32) of x_TD, all in
    order if None.

    Raises ValueError if shapes do not match or an index is out of range.
    """
    num_tokens, hidden = x_TD.shape
    num_rows = num_tokens if index_N is None else index_N.shape[0]
    _check_rows(rows_NB, num_rows, row_bytes(hidden, wire_format))
    lib = library.load()
    if lib is None or not library.fits(x_TD) or rows_NB.device.type != "cpu":
        twin.encode(x_TD, index_N, rows_NB, wire_format)
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
            FORMATS[wire_format],
            rows_NB.data_ptr(),
            rows_NB.stride(0),
        )
    )


def decode(rows_NB: Tensor, out_ND: Tensor, wire_format: str) -> None:
    """Fill out_ND (FP32) with what `encode` wrote. Raises ValueError if shapes do not match."""
    num_rows, hidden = out_ND.shape
    _check_rows(rows_NB, num_rows, row_bytes(hidden, wire_format))
    lib = library.load()
    if lib is None or not library.fits(out_ND) or rows_NB.device.type != "cpu":
        twin.decode(rows_NB, out_ND, wire_format)
        return
    library.check_status(
        lib.hadal_decode(
            library.team(),
            rows_NB.data_ptr(),
            rows_NB.stride(0),
            num_rows,
            hidden,
            FORMATS[wire_format],
            out_ND.data_ptr(),
        )
    )


def weighted_sum(
    rows_PB: Tensor,
    wire_format: str,
    at_TK: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    out_TD: Tensor,
) -> None:
    """out[t] = sum over k of weights[t, k] * row at[t, k], by ascending id, one fused multiply-add
    each.

    `wire_format` "fp32" or "bf16"; rows_PB without gaps. Raises ValueError if shapes do not match.
    """
    num_tokens, hidden = out_TD.shape
    num_rows, top_k = rows_PB.shape[0], ids_TK.shape[1]
    if wire_format not in ("fp32", "bf16") or top_k > MAX_TOP_K:
        raise ValueError(f"rows of {wire_format} with {top_k} of a token cannot be summed.")
    library.check_shape("rows_PB", rows_PB, (num_rows, row_bytes(hidden, wire_format)))
    for name, tensor in (("at_TK", at_TK), ("ids_TK", ids_TK), ("weights_TK", weights_TK)):
        library.check_shape(name, tensor, (num_tokens, top_k))
    lib = library.load()
    if lib is None or not library.fits(weights_TK, out_TD) or not rows_PB.is_contiguous():
        twin.weighted_sum(rows_PB, wire_format, at_TK, ids_TK, weights_TK, out_TD)
        return
    at_TK, ids_TK = library.as_int(at_TK, torch.int32), library.as_int(ids_TK, torch.int64)
    library.check_status(
        lib.hadal_weighted_sum(
            library.team(),
            rows_PB.data_ptr(),
            num_rows,
            hidden,
            int(wire_format == "bf16"),
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
        raise ValueError("rows_NB must be uint8 with a row's bytes side by side.")


# Whole messages of a dispatch written and read in one call each. Knows their layout (comm/layout),
# no links.
#
# Where the kernels cannot run, both answer that they did nothing; the plain path is
# comm/expert_comm and comm/expert_comm, which give the same bytes. Shapes: T tokens, D hidden, K
# chosen, N received rows, M received pairs, R ranks, S slots of a rank.


Arrived = tuple[Tensor, int, int]
"""A message, its rows, its pairs: its size was checked against them."""


def pack(
    x_TD: Tensor,
    route: Route,
    num_slots: int,
    wire: str,
    is_low_latency: bool,
    layer: int,
    kind: int,
    offset_R: Sequence[int],
    buffer: Tensor,
) -> bool:
    """Write every rank's message at its offset in the buffer (-1: none). False: nothing was
    done.
    """
    lib = library.load()
    num_tokens, top_k = route.at_TK.shape
    if lib is None or not library.fits(x_TD) or buffer.device.type != "cpu" or top_k > MAX_TOP_K:
        return False
    num_ranks = len(offset_R)
    shape = (ctypes.c_int32 * 9)(
        num_tokens,
        top_k,
        x_TD.shape[1],
        num_slots,
        num_ranks,
        FORMATS[wire],
        is_low_latency,
        layer,
        kind,
    )
    counts = (ctypes.c_int32 * (3 * num_ranks))(
        *route.num_pairs_R, *route.num_rows_R, *list(accumulate(route.num_pairs_R, initial=0))[:-1]
    )
    at = ctypes.addressof(counts)
    offsets = (ctypes.c_int64 * num_ranks)(*offset_R)
    library.check_status(
        lib.hadal_pack(
            library.team(),
            ctypes.addressof(shape),
            x_TD.data_ptr(),
            route.slot_TK.data_ptr(),
            route.at_TK.data_ptr(),
            at,
            at + 4 * num_ranks,
            route.row_P.data_ptr(),
            route.slot_P.data_ptr(),
            ctypes.addressof(offsets),
            at + 8 * num_ranks,
            buffer.data_ptr(),
        )
    )
    return True


def unpack(
    messages: Sequence[Arrived],
    x_TD: Tensor,
    own: tuple[Tensor, Tensor, Tensor],
    counts_S: Tensor,
    wire: str,
    is_low_latency: bool,
    row_M: Tensor,
    slot_M: Tensor,
    out_ND: Tensor,
) -> bool:
    """Fill row_M, slot_M (int64) and out_ND: the own part (tokens, rows, slots; int32), then the
    messages in order.

    Every slot's pairs are added to counts_S (int64). False: nothing was done. Raises ValueError if
    a message names a row or slot that is not there.
    """
    lib = library.load()
    if (
        lib is None
        or not library.fits(x_TD, out_ND)
        or any(m.device.type != "cpu" for m, _, _ in messages)
    ):
        return False
    num_slots = counts_S.shape[0]
    token_N, row_P, slot_P = own
    first_row, first_pair = token_N.shape[0], row_P.shape[0]
    shape = (ctypes.c_int32 * 7)(
        x_TD.shape[1],
        num_slots,
        FORMATS[wire],
        is_low_latency,
        len(messages),
        first_row,
        first_pair,
    )
    numbers: list[int] = []
    for message, num_rows, num_pairs in messages:
        numbers += (message.data_ptr(), num_rows, num_pairs, first_row, first_pair)
        first_row, first_pair = first_row + num_rows, first_pair + num_pairs
    library.check_shape("out_ND", out_ND, (first_row, x_TD.shape[1]))
    library.check_shape("row_M", row_M, (first_pair,))
    library.check_shape("slot_M", slot_M, (first_pair,))
    arrived = (ctypes.c_int64 * len(numbers))(*numbers)
    library.check_status(
        lib.hadal_unpack(
            library.team(),
            ctypes.addressof(shape),
            ctypes.addressof(arrived),
            x_TD.data_ptr(),
            token_N.data_ptr(),
            row_P.data_ptr(),
            slot_P.data_ptr(),
            row_M.data_ptr(),
            slot_M.data_ptr(),
            counts_S.data_ptr(),
            out_ND.data_ptr(),
        )
    )
    return True

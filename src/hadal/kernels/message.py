"""Write and read whole dispatch messages, one call each. Depends on their layout (comm/layout), not
on links.

Where the kernels cannot run, both functions return False and do nothing; the plain path is
comm/expert_comm, which produces the same bytes. Shapes: T tokens, D hidden, K chosen, N received
rows, M received pairs, R ranks, S expert slots of a rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from hadal.kernels import library
from hadal.kernels.codec import FORMATS, MAX_TOP_K
from hadal.reference.route import Route

Arrived = tuple[Tensor, int, int]
"""(message, number of rows, number of pairs). The message's size was checked against both."""

NORMAL, LOW_LATENCY = 1, 2
"""Kinds of messages. The header has the kind, so that a rank in the other mode rejects it."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Kind of a message and format of its rows."""

    kind: int
    row_format: str


def pack(
    x_TD: Tensor,
    route: Route,
    message_format: MessageFormat,
    num_expert_slots: int,
    layer: int,
    offset_R: Sequence[int],
    buffer: Tensor,
) -> bool:
    """Write each rank's message at its offset in the buffer (-1: no message). Return False, and
    write nothing, where the kernels cannot run.
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
        num_expert_slots,
        num_ranks,
        FORMATS[message_format.row_format],
        message_format.kind == LOW_LATENCY,
        layer,
        message_format.kind,
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
            route.expert_slot_TK.data_ptr(),
            route.at_TK.data_ptr(),
            at,
            at + 4 * num_ranks,
            route.row_P.data_ptr(),
            route.expert_slot_P.data_ptr(),
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
    message_format: MessageFormat,
    counts_S: Tensor,
    row_M: Tensor,
    expert_slot_M: Tensor,
    out_ND: Tensor,
) -> bool:
    """Fill row_M, expert_slot_M (int64) and out_ND: first from `own` (this rank's tokens, rows,
    expert slots; int32), then from the messages in order. Add each expert slot's number of pairs to
    counts_S (int64). Return False, and write nothing, where the kernels cannot run. Raises
    ValueError if a message names a row or expert slot out of range.
    """
    lib = library.load()
    if (
        lib is None
        or not library.fits(x_TD, out_ND)
        or any(m.device.type != "cpu" for m, _, _ in messages)
    ):
        return False
    num_expert_slots = counts_S.shape[0]
    token_N, row_P, expert_slot_P = own
    first_row, first_pair = token_N.shape[0], row_P.shape[0]
    shape = (ctypes.c_int32 * 7)(
        x_TD.shape[1],
        num_expert_slots,
        FORMATS[message_format.row_format],
        message_format.kind == LOW_LATENCY,
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
    library.check_shape("expert_slot_M", expert_slot_M, (first_pair,))
    arrived = (ctypes.c_int64 * len(numbers))(*numbers)
    library.check_status(
        lib.hadal_unpack(
            library.team(),
            ctypes.addressof(shape),
            ctypes.addressof(arrived),
            x_TD.data_ptr(),
            token_N.data_ptr(),
            row_P.data_ptr(),
            expert_slot_P.data_ptr(),
            row_M.data_ptr(),
            expert_slot_M.data_ptr(),
            counts_S.data_ptr(),
            out_ND.data_ptr(),
        )
    )
    return True

"""Draw tokens on a CPU, all rows of a step in one call. Twin: `hadal.reference.sampling`, which
documents the rules. A row's token does not depend on the batch or the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hadal.kernels import library
from hadal.reference import sampling as twin
from hadal.reference.sampling import ROW, SLOT, TOKEN_VALUE, RowMasks, SlotTable


def sample(
    logits_RV: Tensor,
    slots_B: np.ndarray,
    num_B: np.ndarray,
    fed_R: np.ndarray,
    table: SlotTable,
    masks: RowMasks | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw tokens, with the twin's arguments and results. Raises ValueError, before any draw, if
    shapes or types do not match, or a slot is out of range or listed twice.
    """
    lib = library.load()
    if lib is None or logits_RV.device.type != "cpu":
        return twin.sample(logits_RV, slots_B, num_B, fed_R, table, masks)
    if logits_RV.dtype is not torch.float32:
        logits_RV = logits_RV.float()
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    num_rows, vocabulary = logits_RV.shape
    batch, num_slots = len(slots_B), len(table.slots_S)
    library.check_array("slots_B", slots_B, batch, np.int64)
    library.check_array("num_B", num_B, batch, np.int64)
    library.check_array("fed_R", fed_R, num_rows, np.int64)
    library.check_array("slots_S", table.slots_S, num_slots, SLOT)
    library.check_array("bias", table.bias, len(table.bias), TOKEN_VALUE)
    for name, history_SV in (("counts_SV", table.counts_SV), ("seen_SV", table.seen_SV)):
        if history_SV is not None:
            library.check_shape(name, history_SV, (num_slots, vocabulary))
    if masks is not None:
        _check_masks(masks, num_rows, vocabulary)
    # The C++ code rejects slots out of range.
    num_best = int(table.slots_S["num_logprobs"].take(slots_B, mode="clip").max(initial=0))
    ints = np.empty(1 + batch + num_rows, np.int64)  # Number of drawn tokens, num_drawn_B, at_R.
    rows_R, best_RK = np.empty(num_rows, ROW), np.empty((num_rows, num_best), TOKEN_VALUE)
    at = ints.ctypes.data
    library.check_status(
        lib.hadal_sample(
            library.team(),
            logits_RV.data_ptr(),
            logits_RV.stride(0),
            num_rows,
            batch,
            vocabulary,
            slots_B.ctypes.data,
            num_B.ctypes.data,
            fed_R.ctypes.data,
            table.slots_S.ctypes.data,
            num_slots,
            table.bias.ctypes.data,
            None if table.counts_SV is None else table.counts_SV.data_ptr(),
            None if table.seen_SV is None else table.seen_SV.data_ptr(),
            None if masks is None else masks.bits_MW.ctypes.data,
            None if masks is None else masks.of_R.ctypes.data,
            num_best,
            at + 8,
            at + 8 * (1 + batch),
            rows_R.ctypes.data,
            best_RK.ctypes.data,
            at,
        )
    )
    num_drawn = int(ints[0])
    num_drawn_B, at_N = ints[1 : 1 + batch], ints[1 + batch :][:num_drawn]
    return num_drawn_B, at_N, rows_R[:num_drawn], best_RK[:num_drawn]


def _check_masks(masks: RowMasks, num_rows: int, vocabulary: int) -> None:
    bits_MW, num_words = masks.bits_MW, -(-vocabulary // 32)
    library.check_array("of_R", masks.of_R, num_rows, np.int64)
    if bits_MW.shape[1:] != (num_words,) or bits_MW.dtype != np.uint32:
        raise ValueError(f"bits_MW must be masks of {num_words} uint32.")
    if not bits_MW.flags.c_contiguous:
        raise ValueError("bits_MW must be contiguous.")
    if not ((masks.of_R >= -1) & (masks.of_R < len(bits_MW))).all():
        raise ValueError(f"of_R must have -1 or the number of one of the {len(bits_MW)} masks.")

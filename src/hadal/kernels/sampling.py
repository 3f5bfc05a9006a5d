"""Drawing tokens on a CPU, all rows of a step in one call. Twin: `hadal.reference.sampling`, which
says what is drawn.

A row's token is bit-equal whatever the batch and the number of threads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hadal.kernels import library
from hadal.reference import sampling as twin
from hadal.reference.sampling import ROW, SLOT, TOKEN_VALUE, SlotTable


def sample(
    logits_BV: Tensor, slots_B: np.ndarray, indices_B: np.ndarray, table: SlotTable
) -> tuple[np.ndarray, np.ndarray]:
    """See the twin. Raises ValueError if shapes or types do not match, or there is no such slot."""
    lib = library.load()
    if lib is None or logits_BV.device.type != "cpu":
        return twin.sample(logits_BV, slots_B, indices_B, table)
    logits_BV = logits_BV.float()
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    batch, vocabulary = logits_BV.shape
    num_slots = len(table.slots_S)
    _check("slots_B", slots_B, batch, np.int64)
    _check("indices_B", indices_B, batch, np.int64)
    _check("slots_S", table.slots_S, num_slots, SLOT)
    _check("bias", table.bias, len(table.bias), TOKEN_VALUE)
    for name, history_SV in (("counts_SV", table.counts_SV), ("seen_SV", table.seen_SV)):
        if history_SV is not None:
            library.check_shape(name, history_SV, (num_slots, vocabulary))
    num_best = max(int(table.slots_S["num_logprobs"][slots_B].max(initial=0)), 0)
    rows_B, best_BN = np.empty(batch, ROW), np.empty((batch, num_best), TOKEN_VALUE)
    library.check_status(
        lib.hadal_sample(
            library.team(),
            logits_BV.data_ptr(),
            logits_BV.stride(0),
            batch,
            vocabulary,
            slots_B.ctypes.data,
            indices_B.ctypes.data,
            table.slots_S.ctypes.data,
            num_slots,
            table.bias.ctypes.data,
            None if table.counts_SV is None else table.counts_SV.data_ptr(),
            None if table.seen_SV is None else table.seen_SV.data_ptr(),
            num_best,
            rows_B.ctypes.data,
            best_BN.ctypes.data,
        )
    )
    return rows_B, best_BN


def _check(name: str, values: np.ndarray, length: int, dtype: npt.DTypeLike) -> None:
    if values.shape != (length,) or values.dtype != dtype or not values.flags.c_contiguous:
        raise ValueError(f"{name} must be {length} values of {dtype} side by side.")

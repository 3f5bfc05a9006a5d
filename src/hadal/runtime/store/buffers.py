"""Memory that blocks pass through between a pool and a disk."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from hadal.runtime.store.segments import Bytes, slot_bytes_of

HUGE_PAGE = 2 * 1024 * 1024


def make_buffer(block_bytes: int, most_bytes: int) -> Bytes:
    """Return memory for adjacent slots, [slots, slot_bytes]: at most `most_bytes`, but one slot at
    least.

    It has huge pages if the kernel provides them: a request to a disk may have a limited number of
    separate memory ranges, so with small pages the requests are small.
    """
    slot_bytes = slot_bytes_of(block_bytes)
    num_slots = max(1, most_bytes // slot_bytes)
    memory = mmap.mmap(
        -1, num_slots * slot_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # A kernel without huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    every: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
    # Touch the memory now, not in a load: finding huge pages takes long when memory is full.
    every.fill(0)
    begin = -every.ctypes.data % HUGE_PAGE
    return every[begin : begin + num_slots * slot_bytes].reshape(num_slots, slot_bytes)

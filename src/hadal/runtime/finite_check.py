"""Search the matrices of a model's files for values that are not finite, in the background.

Norms, gates, biases and scales are checked when they are loaded (model/checkpoint), before a unit is
ready. Matrices are 99 % of the bytes, and reading them all would delay the start. So a thread reads
them afterwards, a piece at a time, and ends the process at the first value that is not finite.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hadal.core.errors import CheckpointError
from hadal.core.model_config import ModelConfig
from hadal.runtime.headers import TensorEntry, read_header
from hadal.runtime.model_files import end_process
from hadal.runtime.weight_check import model_tensors, mtp_tensors, read_index

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
PAUSE_S = 0.02
"""Pause after each PIECE_BYTES, in seconds. It limits reading to about 210 MB/s."""
_LOWEST_PRIORITY = 19
"""Largest nice value of Linux."""
# A value is infinite or NaN if all its exponent bits are set; in FP8 E4M3 all bits but the sign,
# because it has no infinities.
_BITS: dict[str, tuple[np.dtype[Any], int]] = {
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F16": (np.dtype("<u2"), 0x7C00),
    "F32": (np.dtype("<u4"), 0x7F800000),
    "F8_E4M3": (np.dtype("u1"), 0x7F),
}


def watch_matrices(
    folder: Path,
    config: ModelConfig,
    *,
    part: int,
    num_parts: int,
    with_mtp: bool,
    end: Callable[[str], None] = end_process,
) -> threading.Thread:
    """Check this rank's part of the matrices in a thread, which is returned. The thread calls `end`
    with a message that names file and tensor at the first value that is not finite.
    """

    def look() -> None:
        with contextlib.suppress(OSError):  # A sandbox may forbid it.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            why = first_not_finite(folder, names, lambda: time.sleep(PAUSE_S))
        except (CheckpointError, OSError) as error:  # The files changed; watch_model reports that.
            return log.warning("the model's matrices were not checked: %s", error)
        if why:
            end(why)
        else:
            log.info("all values of the model's matrices are finite")

    tensors = [*model_tensors(config), *(mtp_tensors(config) if with_mtp else ())]
    names = [each.name for each in tensors if each.is_matrix][part::num_parts]
    thread = threading.Thread(target=look, name="finite-check", daemon=True)
    thread.start()
    return thread


def first_not_finite(folder: Path, names: Iterable[str], pause: Callable[[], None]) -> str:
    """Return a sentence that names the first of these tensors with a non-finite value; empty if all
    are finite. Dtypes that are not in _BITS are not read. `pause` is called after each
    PIECE_BYTES. Raises CheckpointError or OSError if a file cannot be read.
    """
    name_to_file = read_index(folder)
    bases: dict[Path, tuple[int, dict[str, TensorEntry]]] = {}
    num_read = 0
    for name in names:
        path = folder / name_to_file[name]
        if path not in bases:
            header = read_header(path)
            # The data are at the end of the file, as read_header has checked.
            num_bytes = max(each.data_offsets[1] for each in header.values())
            bases[path] = path.stat().st_size - num_bytes, header
        base, header = bases[path]
        entry = header[name]
        if entry.dtype not in _BITS:
            continue
        kind, bits = _BITS[entry.dtype]
        with path.open("rb", buffering=0) as file:
            begin, end = (base + each for each in entry.data_offsets)
            for at in range(begin, end, PIECE_BYTES):
                piece = os.pread(file.fileno(), min(PIECE_BYTES, end - at), at)
                values = np.frombuffer(piece[: len(piece) // kind.itemsize * kind.itemsize], kind)
                if bool(((values & bits) == bits).any()):
                    return (
                        f"{path}: {name} holds values that are not finite. The file is damaged: copy"
                        " or convert it again."
                    )
                num_read += len(piece)
                if num_read >= PIECE_BYTES:
                    num_read -= PIECE_BYTES
                    pause()
    return ""

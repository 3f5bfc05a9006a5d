"""Headers of a checkpoint's *.safetensors files: names, dtypes and sizes of their tensors.

Reads no weights and loads no torch.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hadal.core.errors import CheckpointError
from hadal.core.framing import U64

MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors format allows."""


@dataclass(frozen=True)
class StoredWeights:
    """Size and dtypes of a checkpoint's weights, from its files' headers."""

    num_files: int
    dtype_to_bytes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.dtype_to_bytes.values())

    @property
    def precision(self) -> str:
        """Return the dtype with the most bytes; "empty" if there are no tensors."""
        return max(self.dtype_to_bytes, key=self.dtype_to_bytes.__getitem__, default="empty")


def stored_weights(folder: Path) -> StoredWeights | None:
    """Return the sums of all *.safetensors headers; None without files. Raises CheckpointError."""
    paths = weight_files(folder)
    num_bytes: Counter[str] = Counter()
    for path in paths:
        header = read_header(path)
        for entry in header.values():
            begin, end = entry.data_offsets
            if entry.dtype:
                num_bytes[entry.dtype] += end - begin
    return StoredWeights(len(paths), dict(num_bytes)) if paths else None


def weight_files(folder: Path) -> list[Path]:
    """Return the *.safetensors files of a folder, by name."""
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


class TensorEntry(msgspec.Struct):
    """Entry of a tensor in a file's header. The entry of `__metadata__` has defaults only."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return tensor -> entry, from a file's header. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            (length,) = U64.unpack(file.read(8))
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: damaged or cut off; its header claims {length} bytes."
                )
            header = msgspec.json.decode(file.read(length), type=dict[str, TensorEntry])
            end = 8 + length + max((entry.data_offsets[1] for entry in header.values()), default=0)
            size = os.fstat(file.fileno()).st_size
            if size != end:
                raise CheckpointError(
                    f"{path}: damaged or cut off; its tensors end at byte {end}, the file at {size}."
                )
    except (
        OSError,
        struct.error,
        UnicodeDecodeError,
        RecursionError,
        msgspec.MsgspecError,
    ) as error:
        raise CheckpointError(
            f"{path}: damaged or cut off, not a whole safetensors file ({error})."
        ) from error
    return header

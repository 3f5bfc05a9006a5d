"""A Hugging Face folder of safetensors, mapped into memory. Independent of the architecture.

A tensor requested in its stored format is not copied: it consists of the files' pages, which all
processes of a host share. Every defect found raises a CheckpointError that names the file or folder
and, for a defect of a tensor, the tensor. Values of matrices are not checked.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hadal.core.documents import cut, read_json, shown
from hadal.core.errors import CheckpointError
from hadal.reference.fp8 import num_scales
from hadal.reference.params import FP8, Matrix

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_NAME_CHARS = 200
_MAX_LAYER_DIGITS = 6
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """Context manager for a folder's tensors by name. Files are opened when first needed."""

    def __init__(
        self,
        folder: Path,
        block_size: tuple[int, int] | None,
        scale_names: tuple[str, ...] = ("weight_scale_inv",),
    ) -> None:
        """`block_size`: block shape of the FP8 scales, from config.json; None if no FP8 is
        expected. `scale_names`: possible last parts of the scales' names, first choice first.
        """
        self._folder = folder
        self._block_size = block_size
        self._scale_names = scale_names
        self._files: dict[str, Any] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._stack = ExitStack()
        self._file_of_name = self._read_index()
        self._shard_to_path = {shard: folder / shard for shard in self._file_of_name.values()}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of_name

    def check_layers(self, num_hidden_layers: int) -> None:
        """Raise CheckpointError if the files have more layers than the config: they belong to
        another model.
        """
        for name in self._file_of_name:
            match = re.fullmatch(r"(model\.layers\.([0-9]+)\.)input_layernorm\.weight", name)
            # Check the digits first: Python refuses to convert a number of five thousand digits.
            if match is None or (
                len(match[2]) < _MAX_LAYER_DIGITS and int(match[2]) < num_hidden_layers
            ):
                continue
            if (
                f"{match[1]}eh_proj.weight" not in self._file_of_name
            ):  # MTP modules follow the last layer.
                raise CheckpointError(
                    f"{self._path(name)}: holds {cut(name)}, but num_hidden_layers in config.json"
                    f" is {num_hidden_layers}."
                )

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return an FP32 copy of a tensor that is not a matrix or must not be rounded. Raises
        CheckpointError if it is absent, damaged, of another shape, or not FP32, BF16 or FP16.
        """
        tensor = self._shaped(name, shape)
        if tensor.dtype == FP8:
            raise CheckpointError(f"{self._path(name)}: {name} is FP8; only matrices can be.")
        values = tensor.to(torch.float32, copy=True)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{self._path(name)}: {name} holds values that are not finite. The file is damaged:"
                " copy or convert it again."
            )
        return values

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """Return a weight in its stored format; FP16 becomes FP32. Raises CheckpointError if it is
        absent, damaged or of another shape or type, or if it is FP8 without valid scales.
        """
        values = self._shaped(name, shape)
        if values.dtype == FP8:
            scales, block = self._scales(name, values)
            return Matrix(values, scales, block)
        return Matrix(values if values.dtype != torch.float16 else values.float())

    def _shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the stored tensor. Raises CheckpointError for another shape or an unreadable type."""
        tensor = self._tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._path(name)}: {name} has shape {list(tensor.shape)}; config.json asks for"
                f" {list(shape)}."
            )
        if tensor.dtype not in (*_PLAIN, FP8):
            raise CheckpointError(
                f"{self._path(name)}: {name} is {_dtype(tensor)}; FP32, BF16, FP16 or FP8 E4M3 can"
                " be read."
            )
        return tensor

    def _scales(self, name: str, codes: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return (FP32 scales of an FP8 matrix, shape of the blocks that they apply to)."""
        path = self._path(name)
        if self._block_size is None:
            raise CheckpointError(
                f"{path}: {name} is FP8, but config.json has no quantization_config."
            )
        prefix = name.removesuffix("weight")
        names = [f"{prefix}{each}" for each in self._scale_names]
        scale_name = next((each for each in names if each in self), None)
        if scale_name is None:
            raise CheckpointError(f"{path}: {name} is FP8, but its scales {names[0]} are missing.")
        scale_inv, scale_path = self._tensor(scale_name), self._path(scale_name)
        if scale_inv.dtype == torch.uint8:  # E8M0 in files without a type for it.
            scale_inv = scale_inv.view(torch.float8_e8m0fnu)
        wanted = num_scales((codes.shape[0], codes.shape[1]), self._block_size)
        if scale_inv.shape != wanted:
            raise CheckpointError(
                f"{scale_path}: {scale_name} has shape {list(scale_inv.shape)}; {list(wanted)} is"
                " needed."
            )
        if scale_inv.dtype not in (*_PLAIN, torch.float8_e8m0fnu):
            raise CheckpointError(
                f"{scale_path}: {scale_name} is {_dtype(scale_inv)}; FP32 or E8M0 is needed."
            )
        if not bool(torch.isfinite(scale_inv.float()).all()):
            raise CheckpointError(f"{scale_path}: {scale_name} holds values that are not finite.")
        return scale_inv.float(), self._block_size

    def _tensor(self, name: str) -> Tensor:
        if name not in self:
            raise CheckpointError(
                f"{self._folder}: tensor {name} is missing; config.json says that the model has it."
            )
        path = self._path(name)
        file = self._open(path)
        if name not in self._names[path.name]:
            raise CheckpointError(
                f"{path}: tensor {name} is missing, though {_INDEX} places it there."
            )
        try:
            tensor: Tensor = file.get_tensor(name)
        except (
            SafetensorError,
            OSError,
            ValueError,
            RuntimeError,
            AttributeError,
            KeyError,
        ) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}).") from error
        return tensor

    def _path(self, name: str) -> Path:
        return self._shard_to_path[self._file_of_name[name]]

    def _open(self, path: Path) -> Any:
        if path.name not in self._files:
            if not path.is_file():
                raise CheckpointError(f"{path}: this shard is missing; {_INDEX} names it.")
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(
                    f"{path}: damaged or cut off, not a whole safetensors file ({error})."
                ) from error
            self._files[path.name] = file
            self._names[path.name] = frozenset(file.keys())
        return self._files[path.name]

    def _read_index(self) -> dict[str, str]:
        index, single = self._folder / _INDEX, self._folder / _SINGLE
        if not index.exists():
            if not single.exists():
                raise CheckpointError(
                    f"{self._folder}: no weights; neither {_SINGLE} nor {_INDEX} is there."
                )
            self._open(single)
            return dict.fromkeys(self._names[_SINGLE], _SINGLE)
        fields = read_json(index, "weights index", error=CheckpointError)
        if "weight_map" not in fields:
            raise CheckpointError(f"{index}: weight_map is missing.")
        weight_map = fields["weight_map"]
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                f"{index}: weight_map is {shown(weight_map)}; an object is needed."
            )
        seen: set[str] = set()
        for name, file in weight_map.items():
            if isinstance(file, str) and file in seen:
                continue
            if not _is_file_name(file):
                raise CheckpointError(
                    f"{index}: weight_map says that {shown(name)} is in {shown(file)}; a file name"
                    " in this folder is needed."
                )
            seen.add(file)
        return weight_map


def _is_file_name(value: object) -> bool:
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_NAME_CHARS:
        return False
    return value == Path(value).name and value not in ("", ".", "..")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

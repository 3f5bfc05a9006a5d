"""Weights as C structures (cpu/weight.h, Matrix; cpu/experts.h, MlpMatrices), made on first use and
kept as long as the weight.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from hadal.core.model_config import SCALE_BLOCK
from hadal.kernels.library import check_shape
from hadal.reference.params import FP8, Experts, Matrix, MlpWeights


class _MatrixStruct(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("scales", ctypes.c_void_p)] + [
        (name, ctypes.c_int32)
        for name in (
            "type",
            "columns",
            "first_row",
            "is_tiled",
            "is_rounding_inputs",
        )
    ]


class _Mlp(ctypes.Structure):
    _fields_ = [(name, _MatrixStruct) for name in ("gate", "up", "down")]


_TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, FP8: 2}
TILED_COLUMNS = 512
"""Minimum number of columns of a matrix for tile units: for smaller ones packing the tokens takes
longer than multiplying. The batch does not decide, because it must not change a result.
"""
_described: weakref.WeakKeyDictionary[Matrix | MlpWeights | Experts, Any] = (
    weakref.WeakKeyDictionary()
)


def takes(*weights: Matrix | MlpWeights | Experts | None) -> bool:
    """Return True if the kernels can multiply all these weights in their stored form."""
    return all(describe(weight) is not None for weight in weights if weight is not None)


def address(weight: Matrix | MlpWeights | Experts) -> int:
    """Return the address of the weight's C structure. `takes(weight)` must be true."""
    return ctypes.addressof(describe(weight))


def describe(weight: Matrix | MlpWeights | Experts) -> Any:
    """Return the C structure of a weight; None if the kernels cannot multiply it. Raises ValueError
    if shapes within a network, or of its experts, do not match.
    """
    try:
        return _described[weight]
    except KeyError:
        # If two threads create a structure, keep the first: its address may be in use.
        return _described.setdefault(weight, _structure_of(weight))


def _structure_of(weight: Matrix | MlpWeights | Experts) -> Any:
    if isinstance(weight, Matrix):
        return _matrix_of(weight)
    if isinstance(weight, MlpWeights):
        check_shape("up", weight.up, weight.gate.shape)
        check_shape("down", weight.down, weight.gate.shape[::-1])
        parts = [_matrix_of(matrix) for matrix in (weight.gate, weight.up, weight.down)]
        return None if None in parts else _Mlp(*parts)
    for mlp in filter(None, weight.slots):
        check_shape("an expert's gate", mlp.gate, weight.shape)
    # Structures are cached per expert: if a layer's experts change, only new ones are described.
    mlps = [_Mlp() if mlp is None else describe(mlp) for mlp in weight.slots]
    return None if None in mlps else (_Mlp * len(mlps))(*mlps)


def _matrix_of(matrix: Matrix) -> _MatrixStruct | None:
    values, scales = matrix.values, matrix.scales
    code = _TYPE_CODES.get(values.dtype)
    if code is None or any(x.device.type != "cpu" or not x.is_contiguous() for x in matrix.parts):
        return None
    if scales is not None and (matrix.block != SCALE_BLOCK or scales.dtype is not torch.float32):
        return None
    return _MatrixStruct(
        values.data_ptr(),
        None if scales is None else scales.data_ptr(),
        code,
        matrix.shape[1],
        0,
        code != 0 and matrix.shape[1] >= TILED_COLUMNS,
        matrix.is_rounding_inputs,
    )

"""Weights in the forms of a checkpoint, made of plain values."""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.reference.fp8 import E4M3_MAX
from hadal.reference.params import FP8, Experts, Matrix, MlpWeights

KINDS = ("fp32", "bf16", "fp8", "fp32 rounding its inputs", "fp8 rounding its inputs")
BLOCK = 128


def stored(values_NK: Tensor, kind: str = "fp32") -> Matrix:
    """Return the matrix in this form; its `dense()` returns the values with the form's loss of precision."""
    # "fp32 rounding its inputs" is the form of FP8 weights with scales of other blocks once loaded.
    if kind.startswith("fp32"):
        return Matrix(values_NK, is_rounding_inputs=kind != "fp32")
    if kind == "bf16":
        return Matrix(values_NK.bfloat16())
    rows, columns = values_NK.shape
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    codes = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = values_NK[where].abs().max().clamp(min=1e-6) / E4M3_MAX
            codes[where] = values_NK[where] / scales[i, j]
    return Matrix(codes.clamp(-E4M3_MAX, E4M3_MAX).to(FP8), scales, (BLOCK, BLOCK), kind != "fp8")


def stored_mlp(gate: Tensor, up: Tensor, down: Tensor, kind: str = "fp32") -> MlpWeights:
    return MlpWeights(stored(gate, kind), stored(up, kind), stored(down, kind))


def stored_experts(gate_up_E: Tensor, down_E: Tensor, kind: str = "fp32") -> Experts:
    """Store gate_up [E, 2I, D], gate rows first, and down [E, D, I]."""
    return Experts(
        tuple(
            stored_mlp(*gate_up.chunk(2), down, kind)
            for gate_up, down in zip(gate_up_E, down_E, strict=True)
        )
    )

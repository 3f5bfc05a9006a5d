"""Test that values that are not finite are found in every type of matrix, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hadal.core.errors import CheckpointError
from hadal.model.checkpoint import Checkpoint
from hadal.runtime import finite_check
from hadal.runtime.finite_check import first_not_finite

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def write(folder: Path, dtype: torch.dtype, value: float, at: int) -> None:
    values = torch.linspace(-400.0, 400.0, 3000)
    values[at] = value
    save_file(
        {"a": torch.zeros(7), "b": values.to(dtype), "c": torch.ones(3)},
        folder / "model.safetensors",
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_matrices(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite_check, "PIECE_BYTES", 1024)
    pauses: list[None] = []
    write(tmp_path, dtype, 1.0, 0)
    assert first_not_finite(tmp_path, ["a", "b", "c"], lambda: pauses.append(None)) == ""
    assert len(pauses) >= 2
    pauses.clear()
    assert first_not_finite(tmp_path, ["a", "c"], lambda: pauses.append(None)) == ""
    assert not pauses  # Small matrices together form one piece.
    values = [float("nan")] if dtype == torch.float8_e4m3fn else [float("nan"), float("-inf")]
    for value in values:
        for at in (0, 1500, 2999):
            write(tmp_path, dtype, value, at)
            why = first_not_finite(tmp_path, ["a", "b", "c"], lambda: None)
            assert why.startswith(
                f"{tmp_path}/model.safetensors: b holds values that are not finite"
            )


def test_vectors_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    write(tmp_path, torch.float32, float("inf"), 7)
    with (
        Checkpoint(tmp_path, None) as checkpoint,
        pytest.raises(CheckpointError, match=r"model\.safetensors: b holds values that are not"),
    ):
        checkpoint.vector("b", (3000,))

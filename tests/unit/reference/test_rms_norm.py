"""RMSNorm against its formula, one row at a time."""

from __future__ import annotations

import math

import pytest
import torch

from hadal.reference.products import rms_norm


def test_formula() -> None:
    x, weight = torch.randn(3, 7), torch.rand(7)
    out = rms_norm(x, weight, 1e-3)
    for row in range(3):
        rms = math.sqrt(sum(v * v for v in x[row].tolist()) / 7 + 1e-3)
        expected = [v / rms * w for v, w in zip(x[row].tolist(), weight.tolist(), strict=True)]
        assert out[row].tolist() == pytest.approx(expected)


def test_half_precision_is_summed_in_fp32() -> None:
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # The squares overflow FP16.
    out = rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6)
    assert out.dtype == torch.float16
    assert torch.allclose(out, torch.ones_like(out))

"""Block-scaled FP8: exact decoding, bounded error, ragged edges."""

from __future__ import annotations

import pytest
import torch

from hadal.reference.fp8 import E4M3_MAX, dequantise, e4m3_to_f32, num_scales, quantise


def test_every_finite_code_decodes_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    assert int(finite.sum()) == 254
    e4m3 = codes[finite].view(torch.float8_e4m3fn)
    assert torch.equal(e4m3_to_f32(e4m3), e4m3.float())


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (1, 1), (129, 127), (300, 200), (64, 513)]
)
def test_round_trip(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(
        -3, 2, shape[1]
    )
    codes, scale_inv = quantise(weight, (128, 128))
    assert (codes.shape, codes.dtype) == (weight.shape, torch.float8_e4m3fn)
    assert (
        scale_inv.shape
        == num_scales(shape, (128, 128))
        == (-(-shape[0] // 128), -(-shape[1] // 128))
    )
    out = torch.empty(shape)
    dequantise(codes, scale_inv, (128, 128), out)
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            part = (slice(row, row + 128), slice(column, column + 128))
            largest = float(weight[part].abs().max())
            assert float(scale_inv[row // 128, column // 128]) == pytest.approx(
                max(largest, 1e-4) / E4M3_MAX
            )
            assert torch.equal(
                out[part], codes[part].float() * scale_inv[row // 128, column // 128]
            )
            # Three bits of mantissa: half a step is 1/16 of a normal value. Below those, a step is
            # 2**-9 of the scale; the bound allows a whole one.
            bound = weight[part].abs() / 16 + largest / E4M3_MAX / 2**9 * 1.01
            assert ((out[part] - weight[part]).abs() <= bound).all()


def test_fills_a_part_of_something_larger() -> None:
    """Dequantise straight into stacked tensors in their precision, as the loader does."""
    codes, scale_inv = quantise(torch.randn(140, 20), (128, 128))
    whole, alone = torch.zeros(2, 300, 20, dtype=torch.bfloat16), torch.empty(140, 20)
    dequantise(codes, scale_inv, (128, 128), alone)
    dequantise(codes, scale_inv, (128, 128), whole[1, 160:])
    assert torch.equal(whole[1, 160:], alone.bfloat16())
    assert not whole[0].any()
    assert not whole[1, :160].any()


def test_zeros_stay_zeros() -> None:
    codes, scale_inv = quantise(torch.zeros(130, 3), (128, 128))
    assert torch.isfinite(scale_inv).all()
    assert not codes.float().any()

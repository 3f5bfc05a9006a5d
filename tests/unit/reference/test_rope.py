"""Rotation against complex multiplication, YaRN against its definition pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from hadal.reference.rope import cos_sin_table, rotate
from tests.unit.reference.shapes import make_config

YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def angles(table: torch.Tensor, position: int) -> list[float]:
    cos, sin = table[position].chunk(2)
    return torch.atan2(sin, cos).tolist()


def test_plain_frequencies() -> None:
    table = cos_sin_table(make_config(rope_theta=100.0))
    assert table.shape == (256, 8)
    assert angles(table, 1) == pytest.approx([100.0 ** (-2 * i / 8) for i in range(4)], rel=1e-5)
    assert torch.allclose(table[:, :4] ** 2 + table[:, 4:] ** 2, torch.ones(256, 4))


def test_rotation_is_complex_multiplication() -> None:
    table = cos_sin_table(make_config())
    positions = torch.tensor([0, 5, 200])
    x = torch.randn(3, 2, 8)
    turn = torch.complex(table[positions, :4], table[positions, 4:])[:, None]
    turned = torch.view_as_complex(x.view(3, 2, 4, 2)) * turn
    assert torch.allclose(
        rotate(x, table, positions), torch.view_as_real(turned).flatten(-2), atol=1e-6
    )
    assert torch.equal(rotate(x[:, 0], table, positions), rotate(x, table, positions)[:, 0])


def test_only_the_distance_matters() -> None:
    table = cos_sin_table(make_config())
    query, key = torch.randn(1, 8), torch.randn(1, 8)
    products = [
        float(
            (
                rotate(query, table, torch.tensor([at + 17]))
                * rotate(key, table, torch.tensor([at]))
            ).sum()
        )
        for at in (0, 40, 150)
    ]
    assert products == pytest.approx([products[0]] * 3, abs=1e-4)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    """Use V3's own shape: pairs of more than 32 turns in 4096 tokens stay, those below one turn
    slow down 40 times.
    """
    config = make_config(qk_rope_head_dim=64, rope_scaling=YARN, max_position_embeddings=8)
    ours = angles(cos_sin_table(config), 1)
    plain = [10000.0 ** (-2 * i / 64) for i in range(32)]
    turns = [4096 * frequency / (2 * math.pi) for frequency in plain]
    low = max(i for i in range(32) if turns[i] >= 32)
    high = min(i for i in range(32) if turns[i] <= 1)
    for i in range(32):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        assert ours[i] == pytest.approx(plain[i] * (1 - ramp) + plain[i] / 40 * ramp, rel=1e-4), i


def test_yarn_temperature() -> None:
    def scale(**changes: float) -> float:
        table = cos_sin_table(make_config(rope_scaling={**YARN, **changes}))
        return float(table[0, 0])

    mscale = 0.1 * math.log(40.0)
    assert scale() == 1.0
    assert scale(mscale=0.7, mscale_all_dim=0.9) == pytest.approx(
        (0.7 * mscale + 1) / (0.9 * mscale + 1)
    )
    assert scale(mscale_all_dim=0.0) == pytest.approx(mscale + 1)
    assert make_config(rope_scaling=YARN).softmax_scale == pytest.approx(
        14**-0.5 * (mscale + 1) ** 2
    )

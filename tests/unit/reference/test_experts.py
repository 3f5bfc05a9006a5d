"""Experts token by token, in the order the gate gave them."""

from __future__ import annotations

import torch

from hadal.reference.ops import experts, swiglu
from hadal.reference.params import MlpWeights


def test_every_token_through_its_experts() -> None:
    x, gate_up, down = torch.randn(11, 8), torch.randn(6, 10, 8), torch.randn(6, 8, 5)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(11)])
    weights = torch.rand(11, 3)
    expected = torch.zeros(11, 8)
    for t in range(11):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            expected[t] += weight * swiglu(x[t][None], MlpWeights(gate_up[e], down[e]))[0]
    assert torch.allclose(experts(x, gate_up, down, ids, weights), expected, atol=1e-5)


def test_swiglu_formula() -> None:
    x, mlp = torch.randn(4, 8), MlpWeights(torch.randn(10, 8), torch.randn(8, 5))
    gate, up = mlp.gate_up[:5] @ x[2], mlp.gate_up[5:] @ x[2]
    assert torch.allclose(swiglu(x, mlp)[2], mlp.down @ (gate * gate.sigmoid() * up), atol=1e-5)


def test_no_tokens() -> None:
    ids, weights = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
    empty = experts(torch.randn(0, 8), torch.randn(6, 10, 8), torch.randn(6, 8, 5), ids, weights)
    assert empty.shape == (0, 8)

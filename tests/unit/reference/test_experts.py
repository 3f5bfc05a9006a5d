"""Experts token by token, in the gate's order."""

from __future__ import annotations

import torch

from hadal.reference.experts import experts
from hadal.reference.products import swiglu
from tests.stored import stored_experts, stored_mlp


def test_every_token_through_its_experts() -> None:
    x, held = torch.randn(11, 8), stored_experts(torch.randn(6, 10, 8), torch.randn(6, 8, 5))
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(11)])
    weights = torch.rand(11, 3)
    expected = torch.zeros(11, 8)
    for t in range(11):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            expected[t] += weight * swiglu(x[t][None], held[e])[0]
    assert torch.allclose(experts(x, held, ids, weights), expected, atol=1e-5)


def test_swiglu_formula() -> None:
    x, mlp = torch.randn(4, 8), stored_mlp(*torch.randn(2, 5, 8), torch.randn(8, 5))
    gate, up = mlp.gate.values @ x[2], mlp.up.values @ x[2]
    assert torch.allclose(
        swiglu(x, mlp)[2], mlp.down.values @ (gate * gate.sigmoid() * up), atol=1e-5
    )


def test_no_tokens() -> None:
    ids, weights = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
    held = stored_experts(torch.randn(6, 10, 8), torch.randn(6, 8, 5))
    empty = experts(torch.randn(0, 8), held, ids, weights)
    assert empty.shape == (0, 8)

"""The gate against the paper's equations, one token at a time in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from hadal.reference.experts import gate
from hadal.reference.params import Matrix
from tests.unit.reference.shapes import make_config


def by_hand(
    scores: list[float], bias: list[float], n_group: int, topk_group: int, k: int
) -> set[int]:
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // n_group
    groups = [range(g * size, (g + 1) * size) for g in range(n_group)]
    group_score = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(n_group), key=lambda g: -group_score[g])[:topk_group]
    allowed = [e for g in best for e in groups[g]] if n_group > 1 else list(range(len(scores)))
    return set(sorted(allowed, key=lambda e: -biased[e])[:k])


@pytest.mark.parametrize(
    ("n_group", "topk_group", "k"), [(4, 2, 4), (8, 4, 8), (1, 1, 3), (2, 1, 8)]
)
@pytest.mark.parametrize("normed", [True, False])
def test_equations(n_group: int, topk_group: int, k: int, normed: bool) -> None:
    config = make_config(
        n_group=n_group, topk_group=topk_group, num_experts_per_tok=k, norm_topk_prob=normed
    )
    torch.manual_seed(k)
    x, router, bias = torch.randn(50, 24), torch.randn(16, 24) * 0.3, torch.randn(16) * 0.5
    ids, weights = gate(x, Matrix(router), bias, config)
    assert (ids.shape, ids.dtype, weights.dtype) == ((50, k), torch.int64, torch.float32)
    for token in range(50):
        scores = [1 / (1 + math.exp(-v)) for v in (router @ x[token]).tolist()]
        chosen = ids[token].tolist()
        assert set(chosen) == by_hand(scores, bias.tolist(), n_group, topk_group, k)
        total = sum(scores[e] for e in chosen) if normed else 1.0
        assert weights[token].tolist() == pytest.approx(
            [2.5 * scores[e] / total for e in chosen], rel=1e-4
        )


def test_bias_chooses_and_never_weighs() -> None:
    config = make_config(n_group=1, topk_group=1, num_experts_per_tok=2)
    x, router = torch.randn(1, 24), torch.randn(16, 24)
    bias = torch.zeros(16)
    bias[[3, 11]] = 100.0
    ids, weights = gate(x, Matrix(router), bias, config)
    assert set(ids[0].tolist()) == {3, 11}
    scores = (router @ x[0]).sigmoid()
    assert torch.allclose(weights[0], 2.5 * scores[ids[0]] / scores[[3, 11]].sum())


def test_masked_groups_stay_out_when_every_kept_score_is_negative() -> None:
    """Use negative scores: with 0 in place of -inf, a masked expert would beat every kept one."""
    config = make_config()
    x, router = torch.randn(9, 24), torch.randn(16, 24)
    bias = torch.full((16,), -50.0)
    bias[4:12] = -10.0
    ids, _ = gate(x, Matrix(router), bias, config)
    assert ((ids >= 4) & (ids < 12)).all()

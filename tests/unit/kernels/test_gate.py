"""The gate and the norm against their slow twins."""

from dataclasses import replace

import pytest
import torch

from hadal.core.model_config import ModelConfig
from hadal.kernels.experts import gate
from hadal.kernels.products import rms_norm
from hadal.reference import experts as slow_gate
from hadal.reference import products as slow_norm
from hadal.reference.params import Matrix
from tests.unit.kernels.shapes import odd_config

CONFIG = odd_config(n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, n_group=1, topk_group=1),
        replace(CONFIG, norm_topk_prob=False, n_group=16, topk_group=3, num_experts_per_tok=5),
        replace(CONFIG, n_routed_experts=20, n_group=4, topk_group=2, num_experts_per_tok=3),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 3, 130])
def test_gate_equals_its_twin(config: ModelConfig, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x_TD = torch.randn(num_tokens, config.hidden_size, generator=generator)
    router_ED = torch.randn(config.n_routed_experts, config.hidden_size, generator=generator) / 10
    bias_E = torch.randn(config.n_routed_experts, generator=generator) / 5
    ids, weights = gate(x_TD, Matrix(router_ED), bias_E, config)
    slow_ids, slow_weights = slow_gate.gate(x_TD, Matrix(router_ED), bias_E, config)
    order, slow_order = ids.argsort(-1), slow_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), slow_ids.gather(-1, slow_order))
    torch.testing.assert_close(
        weights.gather(-1, order), slow_weights.gather(-1, slow_order), atol=1e-5, rtol=1e-5
    )


def test_rms_norm_equals_its_twin() -> None:
    x_TD = torch.randn(65, 37, generator=torch.Generator().manual_seed(3)) * 9
    weight_D = torch.randn(37, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(
        rms_norm(x_TD, weight_D, 1e-6), slow_norm.rms_norm(x_TD, weight_D, 1e-6)
    )
    with pytest.raises(ValueError, match="weight_D"):
        rms_norm(x_TD, weight_D[:5].clone(), 1e-6)

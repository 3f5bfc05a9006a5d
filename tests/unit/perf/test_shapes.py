"""FLOPs and bytes of DeepSeek-V3 against the published identities."""

import pytest

from hadal.core.model_config import ModelConfig, parse_model_config
from hadal.perf.shapes import (
    DEEPSEEK_V3,
    absorbed_flops_per_pair,
    causal_pairs,
    combine_bytes,
    dense_params,
    expanded_flops_per_pair,
    expert_params,
    index_flops_per_pair,
    kv_bytes_per_token,
    left_out,
    low_latency_dispatch_bytes,
    normal_dispatch_bytes,
    num_moe_layers,
    weight_bytes,
)
from tests.family import CONFIGS

V32 = parse_model_config(CONFIGS["DeepSeek-V3.2"], "f")


def active_params(model: ModelConfig) -> int:
    """Return the weights that a token is multiplied with: the output head, not the embedding."""
    per_moe = (model.num_experts_per_tok + model.n_shared_experts) * expert_params(model)
    per_moe += model.hidden_size * model.n_routed_experts
    return (
        model.num_hidden_layers * model.attention_weights
        + model.first_k_dense_replace * dense_params(model)
        + num_moe_layers(model) * per_moe
        + model.vocab_size * model.hidden_size
    )


def test_parameters_are_those_of_the_report() -> None:
    assert DEEPSEEK_V3.attention_weights == pytest.approx(187.1e6, rel=1e-3)
    assert expert_params(DEEPSEEK_V3) == pytest.approx(44.04e6, rel=1e-3)
    assert dense_params(DEEPSEEK_V3) == pytest.approx(396.4e6, rel=1e-3)
    assert active_params(DEEPSEEK_V3) == pytest.approx(37e9, rel=0.015)
    model, idle = DEEPSEEK_V3, DEEPSEEK_V3.n_routed_experts - DEEPSEEK_V3.num_experts_per_tok
    experts = num_moe_layers(model) * idle * expert_params(model)
    total = active_params(model) + model.vocab_size * model.hidden_size + experts
    assert total == pytest.approx(671.03e9, rel=1e-4)
    assert num_moe_layers(DEEPSEEK_V3) == 58


def test_weights_of_a_rank() -> None:
    """Check DeepSeek's units: two slots per decode rank, nine per prefill rank."""
    assert weight_bytes(DEEPSEEK_V3, 2) == pytest.approx(24.2e9, rel=0.01)
    assert weight_bytes(DEEPSEEK_V3, 9) == pytest.approx(42.1e9, rel=0.01)
    routed = 58 * 9 * expert_params(DEEPSEEK_V3)
    found = weight_bytes(DEEPSEEK_V3, 9) - weight_bytes(DEEPSEEK_V3, 9, expert_bytes=0.5)
    assert found == routed / 2


def test_kv_and_messages_to_the_byte() -> None:
    assert kv_bytes_per_token(DEEPSEEK_V3) == 70_272
    assert kv_bytes_per_token(DEEPSEEK_V3, 62) == 71_424
    assert low_latency_dispatch_bytes(DEEPSEEK_V3) == 7_408
    assert normal_dispatch_bytes(DEEPSEEK_V3) == 7_168 + 224 + 64
    assert combine_bytes(DEEPSEEK_V3) == 14_336


def test_attention_flops() -> None:
    """Check the decode profile's core attention: 128 tokens on 4,096 positions, 255 us, 573 TFLOPS."""
    assert absorbed_flops_per_pair(DEEPSEEK_V3) == 2 * 128 * 1088
    assert expanded_flops_per_pair(DEEPSEEK_V3) == 2 * 128 * 320
    flops = 128 * 4096 * absorbed_flops_per_pair(DEEPSEEK_V3)
    assert flops / 255e-6 == pytest.approx(573e12, rel=1e-3)


def test_what_an_indexer_adds_and_leaves_out() -> None:
    added = 1536 * 64 * 128 + 7168 * (128 + 64)
    assert V32.attention_weights == DEEPSEEK_V3.attention_weights + added
    assert kv_bytes_per_token(V32) == 61 * (576 + 128) * 2
    assert index_flops_per_pair(V32) == 2 * 64 * 128
    assert index_flops_per_pair(DEEPSEEK_V3) == 0
    assert left_out(DEEPSEEK_V3, 1, 1e6) == left_out(V32, 2, 2 * 2048) == left_out(V32, 0, 0) == 0
    assert left_out(V32, 3, 3 * 8192) == 0.75


def test_causal_pairs_are_counted_one_by_one() -> None:
    for new, cached in ((1, 0), (5, 0), (7, 11)):
        assert causal_pairs(new, cached) == sum(cached + i + 1 for i in range(new))

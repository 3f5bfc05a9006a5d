"""Small models for tests that need no checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig, parse_model_config
from hadal.reference.params import (
    AttentionWeights,
    Experts,
    LayerWeights,
    Matrix,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)
from hadal.reference.rope import cos_sin_table

_FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 3,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
}


def make_config(**changes: Any) -> ModelConfig:
    return parse_model_config({**_FIELDS, **changes}, "test")


def random_weights(config: ModelConfig, seed: int = 0) -> ModelWeights:
    """Draw weights so large that logits differ; norms and biases are away from 1 and 0."""
    c, generator = config, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (
            1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.2
        )

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    def mlp(width: int) -> MlpWeights:
        shapes = ((width, c.hidden_size), (width, c.hidden_size), (c.hidden_size, width))
        return MlpWeights(*(Matrix(random(*shape)) for shape in shapes))

    def layer(index: int) -> LayerWeights:
        queries, width = c.num_attention_heads * c.qk_head_dim, c.moe_intermediate_size
        both = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
        attention = AttentionWeights(
            Matrix(random(c.q_lora_rank, c.hidden_size)) if c.q_lora_rank else None,
            norm(c.q_lora_rank) if c.q_lora_rank else None,
            Matrix(random(queries, c.q_lora_rank or c.hidden_size)),
            Matrix(random(c.latent_dim, c.hidden_size)),
            norm(c.kv_lora_rank),
            Matrix(random(both, c.kv_lora_rank)),
            Matrix(random(c.hidden_size, c.num_attention_heads * c.v_head_dim)),
        )
        moe = MoeWeights(
            Matrix(random(c.n_routed_experts, c.hidden_size)),
            random(c.n_routed_experts),
            Experts(tuple(mlp(width) for _ in range(c.n_routed_experts))),
            mlp(c.n_shared_experts * width),
        )
        dense = mlp(c.intermediate_size)
        is_moe = c.is_moe(index)
        return LayerWeights(
            norm(c.hidden_size),
            attention,
            norm(c.hidden_size),
            None if is_moe else dense,
            moe if is_moe else None,
        )

    return ModelWeights(
        c,
        Matrix(random(c.vocab_size, c.hidden_size)),
        tuple(layer(i) for i in range(c.num_hidden_layers)),
        norm(c.hidden_size),
        Matrix(random(c.vocab_size, c.hidden_size)),
        None,
        cos_sin_table(c),
    )

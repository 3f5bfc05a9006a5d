"""Small random models of awkward shapes, and a cache with its blocks out of order."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig, parse_model_config
from hadal.reference.attention import SeenEntries
from hadal.reference.params import (
    AttentionWeights,
    Experts,
    IndexerWeights,
    LayerWeights,
    Matrix,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)
from hadal.reference.rope import cos_sin_table
from tests.stored import stored

ODD: dict[str, Any] = {  # Most sizes are no multiple of 16 values, an AVX-512 vector.
    "model_type": "deepseek_v3",
    "vocab_size": 301,
    "hidden_size": 100,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "intermediate_size": 70,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 3,
    "q_lora_rank": 44,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "max_position_embeddings": 2048,
}


def odd_config(**changes: Any) -> ModelConfig:
    return parse_model_config({**ODD, **changes}, "test")


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw values of a size that keeps activations near 1."""
    return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])


def random_weights(
    c: ModelConfig, seed: int = 0, kind: str = "fp32", *, with_mtp: bool = False
) -> ModelWeights:
    """Draw a model of this shape. Matrices of layers and MTP module are stored as `kind`
    (tests/stored), except routers.
    """
    generator = torch.Generator().manual_seed(seed)

    def norm(dim: int) -> Tensor:
        return 1 + 0.1 * torch.randn(dim, generator=generator)

    def matrix(*shape: int) -> Matrix:
        return stored(randn(generator, *shape), kind)

    def mlp(width: int) -> MlpWeights:
        return MlpWeights(
            matrix(width, c.hidden_size), matrix(width, c.hidden_size), matrix(c.hidden_size, width)
        )

    def layer(index: int) -> LayerWeights:
        heads = c.num_attention_heads
        q_lora = c.q_lora_rank
        latent = c.kv_lora_rank
        dim = c.hidden_size
        queries = heads * c.qk_head_dim
        indexer = None
        if c.index_n_heads and c.index_head_dim and q_lora:
            indexer = IndexerWeights(
                q_b=matrix(c.index_n_heads * c.index_head_dim, q_lora),
                k=matrix(c.index_head_dim, dim),
                k_norm_X=norm(c.index_head_dim),
                k_norm_bias_X=0.1 * torch.randn(c.index_head_dim, generator=generator),
                head_weights=matrix(c.index_n_heads, dim),
            )
        attention = AttentionWeights(
            q_a=matrix(q_lora, dim) if q_lora else None,
            q_a_norm_Q=norm(q_lora) if q_lora else None,
            q_b=matrix(queries, q_lora or dim),
            kv_a=matrix(c.latent_dim, dim),
            kv_a_norm_C=norm(latent),
            kv_b=replace(
                matrix(heads * (c.qk_nope_head_dim + c.v_head_dim), latent),
                is_rounding_inputs=False,
            ),
            o=matrix(dim, heads * c.v_head_dim),
            indexer=indexer,
        )
        experts, width = c.n_routed_experts, c.moe_intermediate_size
        moe = MoeWeights(
            router=Matrix(randn(generator, experts, dim)),
            router_bias_E=0.05 * torch.randn(experts, generator=generator),
            experts=Experts(tuple(mlp(width) for _ in range(experts))),
            shared=mlp(c.n_shared_experts * width),
        )
        dense = None if c.is_moe(index) else mlp(c.intermediate_size)
        return LayerWeights(
            norm(dim), attention, norm(dim), dense, moe if c.is_moe(index) else None
        )

    def module() -> MtpWeights:
        dim = c.hidden_size
        block = layer(c.num_hidden_layers)
        return MtpWeights(norm(dim), norm(dim), matrix(dim, 2 * dim), block, norm(dim))

    weights = ModelWeights(
        config=c,
        embed=Matrix(torch.randn(c.vocab_size, c.hidden_size, generator=generator)),
        layers=tuple(layer(index) for index in range(c.num_hidden_layers)),
        norm_D=norm(c.hidden_size),
        head=stored(randn(generator, c.vocab_size, c.hidden_size)),
        mtp=None,
        cos_sin=cos_sin_table(c),
    )
    return dataclasses.replace(weights, mtp=module()) if with_mtp else weights


@dataclasses.dataclass
class Paged:
    """A cache full of random entries; each row's blocks are in random order."""

    cache_PLSD: Tensor
    table_BM: Tensor

    def seen(self, lengths: list[int], layer: int = 1, first: int = 0) -> SeenEntries:
        """Return the entries that rows of these lengths see in a layer."""
        return SeenEntries(self.cache_PLSD, layer, self.table_BM, torch.tensor(lengths), first)


def paged(num_layers: int, entry_dim: int, lengths: list[int], seed: int = 0) -> Paged:
    """Make a cache for `lengths`; entries after each row's length are NaN, so that reading one shows."""
    generator = torch.Generator().manual_seed(seed)
    width = max(1, max((length + 63) // 64 for length in lengths))
    order = torch.randperm(len(lengths) * width, generator=generator) + 1
    table_BM = order.view(len(lengths), width).to(torch.int32)
    cache_PLSD = torch.randn(len(order) + 1, num_layers, 64, entry_dim, generator=generator)
    for row, length in enumerate(lengths):
        for index in range(width):
            cache_PLSD[int(table_BM[row, index]), :, max(0, min(64, length - 64 * index)) :] = (
                float("nan")
            )
    return Paged(cache_PLSD, table_BM)

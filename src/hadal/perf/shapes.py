"""Parameters, FLOPs and bytes of models like DeepSeek-V3, from their dimensions alone.

A multiply-add is two FLOPs. Sources: DeepSeek-V3 technical report (arXiv 2412.19437) for the
dimensions, DeepEP's kernels for the bytes of a token between ranks.
"""

from __future__ import annotations

from hadal.core.model_config import ModelConfig
from hadal.core.rope import RopeScaling

FP8_BYTES, BF16_BYTES, FP32_BYTES = 1, 2, 4
SCALE_CHANNELS = 128
"""Channels that share one FP32 scale in FP8 activations."""
LOW_LATENCY_HEADER_BYTES = 16

DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=RopeScaling(40.0, 4096, 32.0, 1.0, 1.0, 1.0),
    max_position_embeddings=163840,
    num_nextn_predict_layers=1,
    eos_token_ids=(1,),
    weight_block_size=(128, 128),
)
"""DeepSeek-V3 and R1: the released config.json."""


def index_query_dim(model: ModelConfig) -> int:
    """Return the number of values of a token's index queries, all heads; 0 without an indexer."""
    return (model.index_n_heads or 0) * (model.index_head_dim or 0)


def expert_params(model: ModelConfig) -> int:
    """Return the number of weights of one routed expert: gate, up, down."""
    return 3 * model.hidden_size * model.moe_intermediate_size


def dense_params(model: ModelConfig) -> int:
    """Return the number of weights of a dense layer's network."""
    return 3 * model.hidden_size * model.intermediate_size


def num_moe_layers(model: ModelConfig) -> int:
    """Return the number of layers with experts."""
    return model.num_hidden_layers - model.first_k_dense_replace


def weight_bytes(
    model: ModelConfig,
    num_expert_slots: int,
    num_draft_layers: int = 0,
    expert_bytes: float = FP8_BYTES,
) -> int:
    """Return the bytes of a rank's weights with `num_expert_slots` expert replicas in each layer:
    FP8, embedding and head BF16.

    A draft layer is an MoE layer and a projection of two hidden states to one (V3 report 2.2); it
    shares the rest. `expert_bytes`: bytes of one weight of a routed expert, scales included.
    """
    num_layers = num_moe_layers(model) + num_draft_layers
    moe = model.n_shared_experts * expert_params(model) + model.hidden_size * model.n_routed_experts
    fp8 = (
        model.num_hidden_layers * model.attention_weights
        + model.first_k_dense_replace * dense_params(model)
        + num_layers * moe
        + num_draft_layers * (model.attention_weights + 2 * model.hidden_size**2)
    )
    routed = round(num_layers * num_expert_slots * expert_params(model) * expert_bytes)
    return fp8 * FP8_BYTES + routed + 2 * model.vocab_size * model.hidden_size * BF16_BYTES


def kv_bytes_per_token(model: ModelConfig, num_layers: int | None = None) -> int:
    """Return the bytes of a token's BF16 cache entries in all layers (70,272 in V3, 85,888 in
    V3.2), or in `num_layers`.
    """
    return (
        model.entry_dim
        * BF16_BYTES
        * (model.num_hidden_layers if num_layers is None else num_layers)
    )


def absorbed_flops_per_pair(model: ModelConfig) -> int:
    """Return FLOPs per pair of core attention over the latent cache: each head scores `latent_dim`
    values and sums `kv_lora_rank`.
    """
    return 2 * model.num_attention_heads * (model.latent_dim + model.kv_lora_rank)


def index_flops_per_pair(model: ModelConfig) -> int:
    """Return FLOPs per index score: each index head multiplies a query with the position's key
    (DeepSeek-V3.2, arXiv 2512.02556, eq. 1); 0 without an indexer.
    """
    return 2 * index_query_dim(model)


def left_out(model: ModelConfig, num_tokens: float, num_pairs: float) -> float:
    """Return the share of (token, position) pairs that core attention skips. A token attends to
    min(positions, index_topk), so tokens with equal contexts skip max(0, 1 - tokens * index_topk /
    pairs). Unequal contexts skip more.
    """
    if model.index_topk is None or num_pairs <= 0.0:
        return 0.0
    return max(0.0, 1.0 - num_tokens * model.index_topk / num_pairs)


def expanded_flops_per_pair(model: ModelConfig) -> int:
    """Return FLOPs per pair of core attention over keys and values of each head (prefill)."""
    return 2 * model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)


def causal_pairs(new_tokens: float, cached_tokens: float) -> float:
    """Return the (token, position) pairs of new tokens; each attends to itself and all before it."""
    return new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2


def low_latency_dispatch_bytes(model: ModelConfig) -> int:
    """Return a token's bytes: header, FP8 channels, scales (7,408 in V3; DeepEP internode_ll.cu)."""
    hidden = model.hidden_size
    return LOW_LATENCY_HEADER_BYTES + hidden * FP8_BYTES + hidden // SCALE_CHANNELS * FP32_BYTES


def normal_dispatch_bytes(model: ModelConfig) -> int:
    """Return the bytes of one token to one node: channels and scales, ids and weights of its
    experts (DeepEP internode.cu).
    """
    hidden = model.hidden_size
    return (
        hidden * FP8_BYTES
        + hidden // SCALE_CHANNELS * FP32_BYTES
        + model.num_experts_per_tok * 2 * FP32_BYTES
    )


def combine_bytes(model: ModelConfig) -> int:
    """Return the bytes of one token's result, BF16 (14,336 in V3)."""
    return model.hidden_size * BF16_BYTES

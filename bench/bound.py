"""The least time a prefill or a decode step can take: weight bytes over memory bandwidth, FLOPs
over the GEMM rate.

Counts what the algorithm needs, not what an engine does: an expert's weights are read once if any
token of the step wants it, attention in decode is MLA's absorbed form over the latent cache.
Activations and products are FP32, weights what they are stored as. Formulas: arXiv 2412.19437,
section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.machine import Limits
from hadal.core.model_config import ModelConfig

FP32_BYTES = 4
HEAD_BYTES = 2
"""The head of a checkpoint in FP8 is BF16."""


@dataclass(frozen=True)
class Cost:
    """What one step reads and multiplies."""

    num_bytes: float
    flops: float

    def seconds(self, limits: Limits) -> float:
        """Reading and multiplying can overlap, so the longer one counts."""
        return max(self.num_bytes / limits.read_bytes_per_s, self.flops / limits.gemm_flops_per_s)


def prefill_cost(config: ModelConfig, num_tokens: int, weight_bytes: int = FP32_BYTES) -> Cost:
    """A whole prompt: every token through every layer, keys and values expanded once, one row of
    logits. `weight_bytes`: of one weight.
    """
    heads = config.num_attention_heads
    scores = (
        heads * (config.qk_head_dim + config.v_head_dim) * num_tokens * (num_tokens + 1) / 2
    )  # Causal: half of it.
    layers = range(config.num_hidden_layers)
    per_layer = [2 * (num_tokens * _active_weights(config, layer) + scores) for layer in layers]
    head = config.vocab_size * config.hidden_size
    num_bytes = weight_bytes * _weights_touched(config, num_tokens)
    return Cost(num_bytes + max(weight_bytes, HEAD_BYTES) * head, sum(per_layer) + 2 * head)


def decode_cost(
    config: ModelConfig, batch: int, context: int, weight_bytes: int = FP32_BYTES
) -> Cost:
    """One token for each of `batch` requests that have `context` tokens in the cache, which is
    FP32.
    """
    latents = batch * context * config.latent_dim * config.num_hidden_layers
    # Absorbed: a head's scores are over the latent and the rotated key, its output is a mix of
    # latents.
    attention = (
        batch * context * config.num_attention_heads * (config.latent_dim + config.kv_lora_rank)
    )
    head = config.vocab_size * config.hidden_size
    active = sum(_active_weights(config, layer) for layer in range(config.num_hidden_layers))
    flops = 2 * (batch * (active + head) + attention * config.num_hidden_layers)
    num_bytes = weight_bytes * _weights_touched(config, batch) + FP32_BYTES * latents
    return Cost(num_bytes + max(weight_bytes, HEAD_BYTES) * head, flops)


def experts_touched(config: ModelConfig, num_tokens: int) -> float:
    """Expected number of distinct experts of a layer that `num_tokens` tokens choose, if they
    choose evenly.
    """
    total = config.n_routed_experts
    return total * (1 - (1 - config.num_experts_per_tok / total) ** num_tokens)


def num_parameters(config: ModelConfig) -> int:
    """Weights of the model without MTP, norms left out."""
    layers = sum(
        config.attention_weights + _ffn_weights(config, layer, config.n_routed_experts)
        for layer in range(config.num_hidden_layers)
    )
    return round(layers + 2 * config.vocab_size * config.hidden_size)


def num_active_parameters(config: ModelConfig) -> int:
    """Weights that one token is multiplied by, the head's included."""
    layers = sum(_active_weights(config, layer) for layer in range(config.num_hidden_layers))
    return round(layers + config.vocab_size * config.hidden_size)


def _weights_touched(config: ModelConfig, num_tokens: int) -> float:
    """Weights of the layers that a step of so many tokens reads at least once, the embedding's few
    rows left out.
    """
    experts = experts_touched(config, num_tokens)
    return sum(
        config.attention_weights + _ffn_weights(config, layer, experts)
        for layer in range(config.num_hidden_layers)
    )


def _active_weights(config: ModelConfig, layer: int) -> float:
    return config.attention_weights + _ffn_weights(config, layer, config.num_experts_per_tok)


def _ffn_weights(config: ModelConfig, layer: int, num_experts: float) -> float:
    c = config
    if not c.is_moe(layer):
        return 3 * c.hidden_size * c.intermediate_size
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    return expert * (num_experts + c.n_shared_experts) + c.n_routed_experts * c.hidden_size

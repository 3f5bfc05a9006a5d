"""Lower bound of the time of a prefill or a decode step: bytes read divided by memory bandwidth, or FLOPs
divided by the GEMM rate if that is longer.

Counts what the algorithm needs, independent of the engine: an expert's weights are read once if any token of
the step uses it, and attention in decode is MLA's absorbed form over the latent cache. Activations and products
are FP32, weights have their stored type. Formulas: arXiv 2412.19437, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.machine import Limits
from hadal.core.model_config import ModelConfig

FP32_BYTES = 4
HEAD_BYTES = 2
"""Bytes of a weight in the head of an FP8 checkpoint, which is BF16."""


@dataclass(frozen=True)
class Cost:
    """Bytes read and FLOPs computed by one step."""

    num_bytes: float
    flops: float

    def seconds(self, limits: Limits) -> float:
        """Return the lower bound of the step's seconds. Reading and multiplying can overlap, so the longer
        one counts.
        """
        return max(self.num_bytes / limits.read_bytes_per_s, self.flops / limits.gemm_flops_per_s)


def prefill_cost(config: ModelConfig, num_tokens: int, weight_bytes: int = FP32_BYTES) -> Cost:
    """Return the cost of a whole prompt: every token passes every layer, keys and values are expanded once,
    and one row of logits is computed. `weight_bytes`: bytes of one weight.
    """
    heads = config.num_attention_heads
    scores = (
        heads * (config.qk_head_dim + config.v_head_dim) * num_tokens * (num_tokens + 1) / 2
    )  # Causal masking halves the product.
    layers = range(config.num_hidden_layers)
    per_layer = [2 * (num_tokens * _active_weights(config, layer) + scores) for layer in layers]
    head = config.vocab_size * config.hidden_size
    num_bytes = weight_bytes * _weights_touched(config, num_tokens)
    return Cost(num_bytes + max(weight_bytes, HEAD_BYTES) * head, sum(per_layer) + 2 * head)


def decode_cost(
    config: ModelConfig, batch: int, context: int, weight_bytes: int = FP32_BYTES
) -> Cost:
    """Return the cost of one token for `batch` requests with `context` tokens in the FP32 cache."""
    latents = batch * context * config.latent_dim * config.num_hidden_layers
    # Absorbed form: a head's scores are over the latent and the rotated key; its output is a mix of
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
    """Return the expected number of distinct experts of a layer that `num_tokens` tokens choose, if
    choices are even.
    """
    total = config.n_routed_experts
    return total * (1 - (1 - config.num_experts_per_tok / total) ** num_tokens)


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights of the model without MTP and norms."""
    layers = sum(
        config.attention_weights + _ffn_weights(config, layer, config.n_routed_experts)
        for layer in range(config.num_hidden_layers)
    )
    return round(layers + 2 * config.vocab_size * config.hidden_size)


def num_active_parameters(config: ModelConfig) -> int:
    """Return the number of weights that one token is multiplied by, including the head."""
    layers = sum(_active_weights(config, layer) for layer in range(config.num_hidden_layers))
    return round(layers + config.vocab_size * config.hidden_size)


def _weights_touched(config: ModelConfig, num_tokens: int) -> float:
    """Return the number of layer weights that a step of `num_tokens` tokens reads at least once.
    The embedding's few rows are left out.
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

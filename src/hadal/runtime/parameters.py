"""Counts of a model's parameters, and of bytes of weights and KV, by config.json and precision.

Does not depend on ranks or a deployment's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.model_config import ModelConfig


@dataclass(frozen=True)
class Precision:
    """Bytes per value, by kind of value."""

    matrix: float = 4.0
    """Bytes per value of projections and experts."""
    other: int = 4
    """Bytes per value of embedding, head and norms."""
    kv: int = 4


def precision_of(device: str, config: ModelConfig, stored: str) -> Precision:
    """Return the precision of values in memory. `stored`: dtype of most of the checkpoint; empty if
    it was not read: then FP8 if config.json says so, else BF16, as the model family is released.

    On CPUs, weights stay as stored if kernels can compute from them: FP8 matrices with an FP32
    scale per block, and BF16. On GPUs, an FP8 checkpoint is planned for fused kernels: the same
    weights, and KV in BF16. Everything else is FP32, as in serving; see `ranks_in_fp32`.
    """
    kind = stored or ("F8_E4M3" if config.weight_block_size is not None else "BF16")
    is_fp8 = kind == "F8_E4M3" and config.weight_block_size is not None
    if is_fp8:
        rows, columns = config.weight_block_size or (1, 1)
        return Precision(1.0 + 4.0 / (rows * columns), 2, 2 if device == "cuda" else 4)
    return Precision(2.0, 2) if device == "cpu" and kind == "BF16" else Precision()


def model_bytes(config: ModelConfig, precision: Precision, *, has_drafts: bool) -> int:
    """Return the bytes of all weights of the main model, and of the MTP module if it drafts."""
    matrices, others, gates, expert = parameters(config)
    in_matrices = matrices + num_moe_layers(config) * config.n_routed_experts * expert
    if has_drafts:
        matrices, norms, gates_of_module, num_experts = module_parameters(config)
        in_matrices += matrices + num_experts * expert
        others += norms
        gates += gates_of_module
    return int(in_matrices * precision.matrix) + others * precision.other + 4 * gates


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return (all, used by one token) of the main model's parameters, without the MTP module."""
    matrices, others, gates, expert = parameters(config)
    fixed = matrices + others + gates
    num_moe = num_moe_layers(config)
    return (
        fixed + num_moe * config.n_routed_experts * expert,
        fixed + num_moe * config.num_experts_per_tok * expert,
    )


def kv_bytes_per_token(
    config: ModelConfig, precision: Precision, num_layers: int | None = None
) -> int:
    """Return the bytes that all layers cache per token. `num_layers`: the model's if None."""
    return (num_layers or config.num_hidden_layers) * config.entry_dim * precision.kv


def num_moe_layers(config: ModelConfig) -> int:
    return sum(config.is_moe(index) for index in range(config.num_hidden_layers))


def parameters(config: ModelConfig) -> tuple[int, int, int, int]:
    """Return the parameters (in matrices that every rank has; in embedding, head and norms; in
    gates; in one expert of one layer).
    """
    c = config
    dim, num_moe = c.hidden_size, num_moe_layers(c)
    norms = (c.q_lora_rank or 0) + c.kv_lora_rank + 2 * dim + 2 * (c.index_head_dim or 0)
    expert = 3 * dim * c.moe_intermediate_size
    matrices = (
        c.num_hidden_layers * c.attention_weights
        + (c.num_hidden_layers - num_moe) * 3 * dim * c.intermediate_size
    )
    matrices += num_moe * c.n_shared_experts * expert
    others = c.num_hidden_layers * norms + 2 * c.vocab_size * dim + dim
    return matrices, others, num_moe * c.n_routed_experts * (dim + 1), expert


def module_parameters(config: ModelConfig) -> tuple[int, int, int, int]:
    """Return the MTP module's counts (in matrices that every rank has; in norms; in its gate;
    routed experts): one layer and a projection of two hidden states. It shares embedding and head
    with the model.
    """
    c, dim = config, config.hidden_size
    is_moe = c.mtp_is_moe
    width = c.n_shared_experts * c.moe_intermediate_size if is_moe else c.intermediate_size
    matrices = c.attention_weights + 2 * dim * dim + 3 * dim * width
    norms = (c.q_lora_rank or 0) + c.kv_lora_rank + 5 * dim + 2 * (c.index_head_dim or 0)
    num_experts = c.n_routed_experts if is_moe else 0
    return matrices, norms, num_experts * (dim + 1), num_experts

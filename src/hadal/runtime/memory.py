"""The memory plan: what the weights and KV pools of a deployment take, worked out before anything starts.

Pure arithmetic on config.json and one look at the checkpoint's header; loads no torch, allocates nothing.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hadal.core.config import Deployment, UnitsConfig
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig

VALUE_BYTES = 4
"""Of a weight and of a cached value. FP32 on CPU: BF16 arithmetic is several times slower there."""
NUM_SCRATCH_BLOCKS = 1
"""SCRATCH_BLOCK takes the writes of padding."""
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit (safetensors)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a deployment on one host."""

    num_parameters: int
    num_parameters_active: int
    """Used by one token: all but the experts it is not sent to."""
    weight_bytes: int
    """Of one unit, in compute precision."""
    block_bytes: int
    prefill_blocks: int
    """Of one unit, the scratch block included."""
    decode_blocks: int
    kv_bytes: int
    """Of all pools: what shared memory must hold."""
    warnings: tuple[str, ...]

    def total_bytes(self, num_units: int) -> int:
        return num_units * self.weight_bytes + self.kv_bytes


def plan_memory(deployment: Deployment, config: ModelConfig) -> MemoryPlan:
    """Choose the blocks of each pool. Raises ConfigError if a pool could not hold a single token's block."""
    block_bytes = config.num_hidden_layers * BLOCK_TOKENS * config.latent_dim * VALUE_BYTES
    context_blocks = NUM_SCRATCH_BLOCKS + -(-config.max_position_embeddings // BLOCK_TOKENS)
    warnings = []
    for kind in ("prefill", "decode"):
        asked = getattr(deployment, kind).kv_blocks
        if 0 < asked < NUM_SCRATCH_BLOCKS + 1:
            raise ConfigError(f"{kind}.kv_blocks is {asked}; one block is scratch, so at least 2 are needed.")
        if 0 < asked < context_blocks:
            warnings.append(
                f"{kind}.kv_blocks = {asked} holds {(asked - 1) * BLOCK_TOKENS} tokens, less than one whole context of "
                f"{config.max_position_embeddings}; longer requests will fail. {context_blocks} blocks would hold one."
            )
    prefill_blocks = _blocks(deployment.prefill, block_bytes, context_blocks)
    decode_blocks = _blocks(deployment.decode, block_bytes, context_blocks)
    total, active = count_parameters(config)
    return MemoryPlan(
        num_parameters=total,
        num_parameters_active=active,
        weight_bytes=total * VALUE_BYTES,
        block_bytes=block_bytes,
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
        kv_bytes=block_bytes * (prefill_blocks * deployment.prefill.units + decode_blocks * deployment.decode.units),
        warnings=tuple(warnings),
    )


def with_blocks(deployment: Deployment, plan: MemoryPlan) -> Deployment:
    """The deployment with the plan's blocks written in."""
    return dataclasses.replace(
        deployment,
        prefill=dataclasses.replace(deployment.prefill, kv_blocks=plan.prefill_blocks),
        decode=dataclasses.replace(deployment.decode, kv_blocks=plan.decode_blocks),
    )


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return (all, used by one token) of the main model; the MTP module is not loaded for serving."""
    c = config
    dim, heads = c.hidden_size, c.num_attention_heads
    q_rows = heads * c.qk_head_dim
    query = dim * q_rows if c.q_lora_rank is None else c.q_lora_rank * (dim + 1 + q_rows)
    latent = dim * c.latent_dim + c.kv_lora_rank + c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    attention = query + latent + heads * c.v_head_dim * dim + 2 * dim
    expert = 3 * dim * c.moe_intermediate_size
    gate = c.n_routed_experts * (dim + 1)
    num_moe = sum(c.is_moe(index) for index in range(c.num_hidden_layers))
    num_dense = c.num_hidden_layers - num_moe
    fixed = c.num_hidden_layers * attention + num_dense * 3 * dim * c.intermediate_size
    fixed += num_moe * (gate + c.n_shared_experts * expert) + 2 * c.vocab_size * dim + dim
    return fixed + num_moe * c.n_routed_experts * expert, fixed + num_moe * c.num_experts_per_tok * expert


def checkpoint_precision(folder: Path) -> str:
    """The dtype most of the checkpoint's first file is in, by its header. Raises CheckpointError naming the file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors file in it.")
    path = files[0]
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: damaged or cut off; its header claims {length} bytes.")
            header = json.loads(file.read(length))
        num_bytes: Counter[str] = Counter()
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                num_bytes[entry["dtype"]] += end - begin
    except CheckpointError:
        raise
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged or cut off, not a whole safetensors file ({error}).") from error
    return num_bytes.most_common(1)[0][0] if num_bytes else "empty"


def _blocks(units: UnitsConfig, block_bytes: int, context_blocks: int) -> int:
    """As many as fit in `kv_memory_mb`, but never fewer than one whole context unless the file says so."""
    return units.kv_blocks or max(units.kv_memory_mb * 1024 * 1024 // block_bytes, context_blocks)

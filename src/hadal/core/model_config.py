"""A DeepSeek-V3 model's shape, read from a Hugging Face `config.json` and checked field by field.

Knows nothing of tensors. Every name is the checkpoint's own, so that a reader can put the two side
by side. Source of the fields: DeepSeek-V3 technical report (arXiv 2412.19437), section 2 and 4.2,
and the released config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hadal.core.documents import MAX_CONFIG_BYTES, read_json, shown
from hadal.core.errors import CheckpointError

_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# What the architecture fixes. A file that says otherwise is another model, and serving it would
# give wrong tokens.
_FIXED: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "rope_interleave": True,
}


@dataclass(frozen=True)
class RopeScaling:
    """YaRN (arXiv 2309.00071) as DeepSeek-V3 uses it; lengths in tokens."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. `q_lora_rank` None: queries are projected at once."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    num_nextn_predict_layers: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    weight_block_size: tuple[int, int] | None
    """Blocks of the FP8 scales (`quantization_config`); None where the weights are plain."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: the normed latent, then the rotated key (576 for
        V3).
        """
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(qk_head_dim), times YaRN's attention temperature squared."""
        scale = math.pow(self.qk_head_dim, -0.5)
        if (
            self.rope_scaling is not None
            and self.rope_scaling.mscale_all_dim
            and self.rope_scaling.factor > 1
        ):
            mscale = (
                0.1 * self.rope_scaling.mscale_all_dim * math.log(self.rope_scaling.factor) + 1.0
            )
            scale *= mscale * mscale
        return scale

    def is_moe(self, layer_index: int) -> bool:
        return layer_index >= self.first_k_dense_replace


def read_model_config(folder: Path) -> ModelConfig:
    """Read and check `folder/config.json`. Raises CheckpointError naming the file and the field."""
    path = folder / "config.json"
    hint = "Point --model at a Hugging Face folder of a DeepSeek-V3 model."
    fields = read_json(
        path, "model configuration", MAX_CONFIG_BYTES, error=CheckpointError, hint=hint
    )
    return parse_model_config(fields, str(path))


def parse_model_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """Check a config's fields; `source` names the file in errors."""
    if fields.get("model_type") != "deepseek_v3":
        kind = shown(fields.get("model_type"))
        raise CheckpointError(f"{source}: model_type is {kind}; only 'deepseek_v3' is served.")
    for name, value in _FIXED.items():
        if name in fields and (fields[name] != value or type(fields[name]) is not type(value)):
            raise CheckpointError(
                f"{source}: {name} is {shown(fields[name])}; this architecture needs {value!r}."
            )
    values = {**_DEFAULTS, **fields}
    nested = fields.get("rope_parameters")
    if "rope_theta" not in fields and isinstance(nested, Mapping) and "rope_theta" in nested:
        values["rope_theta"] = nested["rope_theta"]  # Where transformers 5 writes it.
    names = ModelConfig.__dataclass_fields__
    own = {"rope_scaling", "eos_token_ids", "weight_block_size", "q_lora_rank"}
    numbers = {
        name: _number(values, name, source, str(names[name].type))
        for name in names
        if name not in own
    }
    q_lora_rank = values.get("q_lora_rank")
    config = ModelConfig(
        **numbers,
        q_lora_rank=None if q_lora_rank is None else _number(values, "q_lora_rank", source, "int"),
        rope_scaling=_rope_scaling(values, source),
        eos_token_ids=_eos(values, source),
        weight_block_size=_weight_block_size(values, source),
    )
    _check(config, source)
    return config


def _number(values: Mapping[str, Any], name: str, source: str, kind: str) -> Any:
    if name not in values:
        raise CheckpointError(f"{source}: {name} is missing.")
    value = values[name]
    if kind == "bool":
        good = isinstance(value, bool)
    elif kind == "int":
        good = isinstance(value, int) and not isinstance(value, bool)
    else:
        good = (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    if not good:
        raise CheckpointError(
            f"{source}: {name} is {shown(value)}; a value of type {kind} is needed."
        )
    return float(value) if kind == "float" else value


def _rope_scaling(values: Mapping[str, Any], source: str) -> RopeScaling | None:
    # transformers 5 writes `rope_parameters`, older files `rope_scaling`; both hold the same keys.
    raw = values.get("rope_scaling") or values.get("rope_parameters")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise CheckpointError(
            f"{source}: rope_scaling is {shown(raw)}; an object or null is needed."
        )
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise CheckpointError(
            f"{source}: rope_scaling.type is {shown(kind)}; only 'yarn' is known."
        )
    where = f"{source}: rope_scaling"
    return RopeScaling(
        factor=_number(raw, "factor", where, "float"),
        original_max_position_embeddings=_number(
            raw, "original_max_position_embeddings", where, "int"
        ),
        **{
            name: _number(raw, name, where, "float")
            for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            if name in raw
        },
    )


def _eos(values: Mapping[str, Any], source: str) -> tuple[int, ...]:
    eos = values["eos_token_id"]
    ids = eos if isinstance(eos, list) else [eos]
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(
            f"{source}: eos_token_id is {shown(eos)}; a token id or a list of them is needed."
        )
    return tuple(ids)


def _weight_block_size(values: Mapping[str, Any], source: str) -> tuple[int, int] | None:
    raw = values.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping) or raw.get("quant_method") != "fp8":
        raise CheckpointError(
            f"{source}: quantization_config is {shown(raw)}; only quant_method 'fp8' is known."
        )
    block = raw.get("weight_block_size")
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(b) is int and 0 < b <= _MAX_BLOCK for b in block)
    ):
        where = f"{source}: quantization_config.weight_block_size"
        raise CheckpointError(f"{where} is {shown(block)}; [128, 128] is expected.")
    return block[0], block[1]


_MAX_BLOCK = 1 << 16
_RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 1 << 22),
    "hidden_size": (1, 1 << 17),
    "num_hidden_layers": (1, 1 << 10),
    "first_k_dense_replace": (0, 1 << 10),
    "intermediate_size": (1, 1 << 20),
    "moe_intermediate_size": (1, 1 << 20),
    "n_routed_experts": (1, 1 << 14),
    "n_shared_experts": (1, 1 << 8),
    "num_experts_per_tok": (1, 1 << 10),
    "n_group": (1, 1 << 14),
    "topk_group": (1, 1 << 14),
    "num_attention_heads": (1, 1 << 12),
    "q_lora_rank": (1, 1 << 17),
    "kv_lora_rank": (1, 1 << 17),
    "qk_nope_head_dim": (1, 1 << 14),
    "qk_rope_head_dim": (1, 1 << 14),
    "v_head_dim": (1, 1 << 14),
    "max_position_embeddings": (1, 1 << 24),
    "num_nextn_predict_layers": (0, 1 << 10),
    "bos_token_id": (0, 1 << 22),
    "rms_norm_eps": (0.0, 1.0),
    "routed_scaling_factor": (1e-6, 1e6),
    "rope_theta": (1.0, 1e12),
}
"""What a field may be at least and at most. The most is 10 to 100 times DeepSeek-V3's: beyond it a
file is damaged or means harm, and loops and tables as long as it says would take all time and
memory.
"""
_ROPE_RANGES: dict[str, tuple[float, float]] = {
    "factor": (1e-3, 1e6),
    "original_max_position_embeddings": (1, 1 << 24),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
}


def _check_ranges(values: object, ranges: Mapping[str, tuple[float, float]], where: str) -> None:
    for name, (least, most) in ranges.items():
        value = getattr(values, name)
        if value is not None and not least <= value <= most:
            wanted = "it must be positive" if value <= 0 else f"{least:,} to {most:,} can be"
            raise CheckpointError(f"{where}{name} is {value:,}; {wanted}.")


def _check(config: ModelConfig, source: str) -> None:
    _check_ranges(config, _RANGES, f"{source}: ")
    if config.rope_scaling is not None:
        _check_ranges(config.rope_scaling, _ROPE_RANGES, f"{source}: rope_scaling.")
    if not all(0 <= i < 1 << 22 for i in config.eos_token_ids):
        raise CheckpointError(
            f"{source}: eos_token_id is {shown(config.eos_token_ids)}; a token's id is needed."
        )
    if config.qk_rope_head_dim % 2:
        raise CheckpointError(
            f"{source}: qk_rope_head_dim is {config.qk_rope_head_dim}; rotation needs pairs."
        )
    if config.n_routed_experts % config.n_group:
        experts = f"n_routed_experts {config.n_routed_experts}"
        raise CheckpointError(f"{source}: n_group {config.n_group} does not divide {experts}.")
    if config.topk_group > config.n_group:
        raise CheckpointError(
            f"{source}: topk_group {config.topk_group} exceeds n_group {config.n_group}."
        )
    reachable = config.topk_group * (config.n_routed_experts // config.n_group)
    if config.num_experts_per_tok > reachable:
        raise CheckpointError(
            f"{source}: num_experts_per_tok {config.num_experts_per_tok} exceeds the {reachable}"
            " experts of its groups."
        )
    if config.n_routed_experts // config.n_group < 2 and config.n_group > 1:
        raise CheckpointError(
            f"{source}: a group needs two experts; its score is the sum of its two best."
        )

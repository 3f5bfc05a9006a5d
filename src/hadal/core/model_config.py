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
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hadal.core.documents import MAX_CONFIG_BYTES, converted, read_json, shown
from hadal.core.errors import CheckpointError

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

# What a field may be at most is 10 to 100 times DeepSeek-V3's: beyond it a file is damaged or means
# harm, and loops and tables as long as it says would take all time and memory.
Layers = Annotated[int, Meta(ge=0, le=1 << 10)]
Width = Annotated[int, Meta(ge=1, le=1 << 17)]
FfnWidth = Annotated[int, Meta(ge=1, le=1 << 20)]
HeadWidth = Annotated[int, Meta(ge=1, le=1 << 14)]
Experts = Annotated[int, Meta(ge=1, le=1 << 14)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 22)]
Factor = Annotated[float, Meta(ge=1e-3, le=1e6)]
_Block = Annotated[int, Meta(ge=1, le=1 << 16)]
Mscale = Annotated[float, Meta(ge=0, le=1e3)]


@dataclass(frozen=True)
class RopeScaling:
    """YaRN (arXiv 2309.00071) as DeepSeek-V3 uses it; lengths in tokens."""

    factor: Factor
    original_max_position_embeddings: Tokens
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    mscale: Mscale = 1.0
    mscale_all_dim: Mscale = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one model. `q_lora_rank` None: queries are projected at once."""

    vocab_size: Annotated[int, Meta(ge=1, le=1 << 22)]
    hidden_size: Width
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1 << 10)]
    first_k_dense_replace: Layers = 0
    intermediate_size: FfnWidth
    moe_intermediate_size: FfnWidth
    n_routed_experts: Experts
    n_shared_experts: Annotated[int, Meta(ge=1, le=1 << 8)] = 1
    num_experts_per_tok: Annotated[int, Meta(ge=1, le=1 << 10)]
    n_group: Experts = 1
    topk_group: Experts = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    num_attention_heads: Annotated[int, Meta(ge=1, le=1 << 12)]
    q_lora_rank: Width | None = None
    kv_lora_rank: Width
    qk_nope_head_dim: HeadWidth
    qk_rope_head_dim: HeadWidth
    v_head_dim: HeadWidth
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    rope_theta: Annotated[float, Meta(ge=1, le=1e12)] = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: Tokens = 4096
    num_nextn_predict_layers: Layers = 0
    bos_token_id: TokenId = 0
    eos_token_ids: tuple[TokenId, ...] = (1,)
    weight_block_size: tuple[int, int] | None = None
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


class _Quantization(msgspec.Struct):
    quant_method: Annotated[str, Meta(pattern=r"^(fp8)\Z")]
    weight_block_size: tuple[_Block, _Block]


class _Ends(msgspec.Struct):
    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Meta(min_length=1)] = 1


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
    ends = converted(fields, _Ends, source, error=CheckpointError).eos_token_id
    # Where the file has a field in another form than we do.
    values: dict[str, Any] = {
        **fields,
        "rope_scaling": _rope_scaling(fields, source),
        "eos_token_ids": (ends,) if isinstance(ends, int) else ends,
        "weight_block_size": None,
    }
    nested = fields.get("rope_parameters")
    if "rope_theta" not in fields and isinstance(nested, Mapping) and "rope_theta" in nested:
        values["rope_theta"] = nested["rope_theta"]  # Where transformers 5 writes it.
    if (found := fields.get("quantization_config")) is not None:
        quantization = converted(
            found, _Quantization, source, "quantization_config", error=CheckpointError
        )
        values["weight_block_size"] = quantization.weight_block_size
    config = converted(values, ModelConfig, source, error=CheckpointError)
    _check(config, source)
    return config


def _rope_scaling(fields: Mapping[str, Any], source: str) -> Any:
    # transformers 5 writes `rope_parameters`, older files `rope_scaling`; both hold the same keys.
    raw = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(raw, Mapping):
        return raw
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise CheckpointError(
            f"{source}: rope_scaling.type is {shown(kind)}; only 'yarn' is known."
        )
    return raw if kind == "yarn" else None


def _check(config: ModelConfig, source: str) -> None:
    """Raise CheckpointError for fields that do not go together."""
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

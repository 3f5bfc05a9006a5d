"""The shape of a model of DeepSeek-V3's architecture, read from a Hugging Face `config.json` and
checked field by field.

Knows nothing of tensors. Every name is the checkpoint's own, so that a reader can put the two side
by side. Source of the fields: DeepSeek-V3 technical report (arXiv 2412.19437), section 2 and 4.2,
and the released config.json. Several makers released models of this architecture, some under a
`model_type` of their own; `FAMILY` names them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from hadal.core.documents import MAX_CONFIG_BYTES, converted, is_file, read_json, shown
from hadal.core.errors import CheckpointError


@dataclass(frozen=True)
class FamilyMember:
    """A member of the family: what config.json does not say of it."""

    name: str
    architecture: str
    """The class that `architectures` names."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that its file leaves out, because its own code has them."""


FAMILY = {
    # V3, V3-0324, R1, R1-0528, V3.1 and Terminus; Moonlight-16B-A3B and GigaChat3, too.
    "deepseek_v3": FamilyMember("DeepSeek-V3", "DeepseekV3ForCausalLM"),
    # V3.2-Exp, V3.2 and Speciale.
    "deepseek_v32": FamilyMember("DeepSeek-V3.2", "DeepseekV32ForCausalLM"),
    "kimi_k2": FamilyMember("Kimi-K2", "DeepseekV3ForCausalLM"),
    # Its MTP layer has a dense network (SGLang's models/joyai_llm_flash_nextn.py).
    "joyai_llm_flash": FamilyMember(
        "JoyAI-LLM-Flash", "DeepseekV3ForCausalLM", {"mtp_is_moe": False}
    ),
    # Without mlp_layer_types its first layer is dense (transformers' Glm4MoeLiteConfig).
    "glm4_moe_lite": FamilyMember(
        "GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", {"first_k_dense_replace": 1}
    ),
}
"""The models that are served, by `model_type`."""

_OTHERS: dict[str, tuple[str, str, str]] = {
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepSeek-V2", "its gate is another (softmax)"),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "DeepSeek-V4",
        "it is another architecture (compressed attention, hyper-connections, FP4 experts)",
    ),
    "deepseek_v41": ("DeepseekV41ForCausalLM", "DeepSeek-V4.1", "it is another architecture"),
    "kimi_k25": (
        "KimiK25ForConditionalGeneration",
        "Kimi-K2.5 or K2.6",
        "it wraps Kimi-K2 in a model of images, and its experts are INT4",
    ),
    "kimi_k3": (
        "KimiK3ForConditionalGeneration",
        "Kimi-K3",
        "it is another architecture (linear attention)",
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "Kimi-Linear",
        "it is another architecture (linear attention)",
    ),
    "kimi_vl": ("KimiVLForConditionalGeneration", "Kimi-VL", "it is a model of images"),
    "glm4_moe": ("Glm4MoeForCausalLM", "GLM-4.5 to 4.7", "its attention has no latents"),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        "GLM-5",
        "its indexer is another (it rotates interleaved pairs, and layers may share a selection)",
    ),
}
"""Models that are taken for one of the family, by `model_type`: class, name, why not."""

_QUANTISATIONS = {
    "auto-round": "AutoRound, 4-bit integers",
    "awq": "AWQ, 4-bit integers",
    "bitsandbytes": "bitsandbytes, 4 or 8 bits",
    "compressed-tensors": "compressed-tensors, such as the INT4 of Kimi-K2-Thinking",
    "fbgemm_fp8": "FP8 with a scale per row",
    "gptq": "GPTQ, 4-bit integers",
    "modelopt": "NVIDIA's ModelOpt, such as NVFP4",
    "modelopt_fp4": "NVIDIA's ModelOpt, NVFP4",
    "mxfp4": "MXFP4",
    "quark": "AMD's Quark, such as MXFP4",
}
_READABLE = "plain weights and 'fp8' with a scale per block can be read"

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
    "partial_rotary_factor": 1.0,
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
SCALE_BLOCK = (128, 128)
"""Rows and columns of a matrix that share a scale in every checkpoint DeepSeek released (arXiv
2412.19437, 3.3.2). Kernels take no others: a matrix with other blocks is held in FP32.
"""
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

    model_type: str = "deepseek_v3"
    """Which of FAMILY it is."""
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
    index_n_heads: Annotated[int, Meta(ge=1, le=1 << 12)] | None = None
    """Heads of the indexer, which chooses the positions that a token attends to (DeepSeek-V3.2);
    None, like the next two: there is none, and a token attends to all.
    """
    index_head_dim: HeadWidth | None = None
    index_topk: Tokens | None = None
    """Positions that a token attends to at most."""
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    rope_theta: Annotated[float, Meta(ge=1, le=1e12)] = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: Tokens = 4096
    num_nextn_predict_layers: Layers = 0
    mtp_is_moe: bool = True
    """Whether an MTP layer, which stands behind the last layer, has experts."""
    bos_token_id: TokenId = 0
    eos_token_ids: tuple[TokenId, ...] = (1,)
    weight_block_size: tuple[int, int] | None = None
    """Blocks of the FP8 scales (`quantization_config`); None where the weights are plain."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values per token and layer that attention reads: the normed latent, then the rotated key
        (576 for V3).
        """
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def entry_dim(self) -> int:
        """Values cached per token and layer: what attention reads, then the indexer's key where
        there is one (704 for V3.2).
        """
        return self.latent_dim + (self.index_head_dim or 0)

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

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's attention: q_a, q_b, kv_a, kv_b, o_proj, and the indexer's, where
        there is one: its queries are made of the query latent, its key and its heads' weights of the
        hidden state.
        """
        heads, hidden, rank = self.num_attention_heads, self.hidden_size, self.q_lora_rank
        index_heads, index_dim = self.index_n_heads or 0, self.index_head_dim or 0
        queries = heads * self.qk_head_dim
        return (
            (hidden * queries if rank is None else rank * (hidden + queries))
            + hidden * self.latent_dim
            + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            + heads * self.v_head_dim * hidden
            + (rank or 0) * index_heads * index_dim
            + hidden * (index_heads + index_dim)
        )

    def is_moe(self, layer_index: int) -> bool:
        if layer_index >= self.num_hidden_layers:
            return self.mtp_is_moe
        return layer_index >= self.first_k_dense_replace


def read_model_config(folder: Path) -> ModelConfig:
    """Read and check `folder/config.json`. Raises CheckpointError naming the file and the field."""
    path = folder / "config.json"
    hint = "Point --model at a Hugging Face folder of a DeepSeek-V3 model."
    fields = read_json(
        path, "model configuration", MAX_CONFIG_BYTES, error=CheckpointError, hint=hint
    )
    beside = folder / "hf_quant_config.json"
    if "quantization_config" not in fields and is_file(beside):
        raise CheckpointError(
            f"{beside}: the weights are quantised by {_QUANTISATIONS['modelopt']}; {_READABLE}."
        )
    return parse_model_config(fields, str(path))


class _Quantization(msgspec.Struct):
    quant_method: Annotated[str, Meta(pattern=r"^(fp8)\Z")]
    weight_block_size: tuple[_Block, _Block]
    scale_fmt: Annotated[str, Meta(pattern=r"^(ue8m0)\Z")] | None = None
    """ue8m0 (V3.1): every scale is a power of two. It is read as the number it is."""


class _Ends(msgspec.Struct):
    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Meta(min_length=1)] | None = 1


def parse_model_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """Check a config's fields; `source` names the file in errors."""
    fields = _as_v32(fields)
    member = _member(fields, source)
    for name, value in _FIXED.items():
        if name in fields and (fields[name] != value or type(fields[name]) is not type(value)):
            raise CheckpointError(
                f"{source}: {name} is {shown(fields[name])}; this architecture needs {value!r}."
            )
    ends = converted(fields, _Ends, source, error=CheckpointError).eos_token_id
    # Where the file has a field in another form than we do.
    values: dict[str, Any] = {
        **member.facts,
        **fields,
        "rope_scaling": _rope_scaling(fields, source),
        "eos_token_ids": (ends,) if isinstance(ends, int) else ends or (),
        "weight_block_size": None,
    }
    if values.get("bos_token_id") is None:
        values.pop("bos_token_id", None)  # GLM begins a text with two tokens of its template.
    if fields.get("mlp_layer_types") is not None:
        values["first_k_dense_replace"] = _num_dense_layers(fields, source)
    nested = fields.get("rope_parameters")
    if "rope_theta" not in fields and isinstance(nested, Mapping) and "rope_theta" in nested:
        values["rope_theta"] = nested["rope_theta"]  # Where transformers 5 writes it.
    if (found := fields.get("quantization_config")) is not None:
        _check_quantisation(found, source)
        quantization = converted(
            found, _Quantization, source, "quantization_config", error=CheckpointError
        )
        values["weight_block_size"] = quantization.weight_block_size
    config = converted(values, ModelConfig, source, error=CheckpointError)
    _check(config, source)
    return config


def _as_v32(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with V3.2's own model_type. Files of it go round with that of V3, for loaders that
    know no other: index_topk tells them apart. Served as V3, they would give wrong tokens beyond so
    many positions; and where they are not V3.2, the indexer's tensors are missing.
    """
    names = {name: FAMILY[name].architecture for name in ("deepseek_v3", "deepseek_v32")}
    is_v32 = fields.get("model_type") == "deepseek_v3" and fields.get("index_topk") is not None
    if not is_v32 or fields.get("architectures") not in (
        None,
        *([name] for name in names.values()),
    ):
        return fields
    named = {"model_type": "deepseek_v32", "architectures": [names["deepseek_v32"]]}
    return {**fields, **named}


def _member(fields: Mapping[str, Any], source: str) -> FamilyMember:
    """Which model it is, by `model_type` and `architectures`. Raises CheckpointError that names
    what is not served.
    """
    kind, classes = fields.get("model_type"), fields.get("architectures")
    for model_type, (architecture, name, why) in _OTHERS.items():
        if kind == model_type or classes == [architecture]:
            _refuse(source, name, why)
    member = FAMILY.get(kind) if isinstance(kind, str) else None
    if member is None:
        known = ", ".join(map(repr, FAMILY))
        raise CheckpointError(f"{source}: model_type is {shown(kind)}; served are {known}.")
    if classes is not None and classes != [member.architecture]:
        raise CheckpointError(
            f"{source}: architectures is {shown(classes)}; with model_type {kind!r} it must be"
            f" [{member.architecture!r}]."
        )
    return member


def _refuse(source: str, name: str, why: str) -> NoReturn:
    raise CheckpointError(f"{source}: this is {name}, which is not served: {why}.")


def _check_quantisation(found: Any, source: str) -> None:
    """Raise CheckpointError that names a method which is known and cannot be read."""
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if isinstance(method, str) and method in _QUANTISATIONS:
        raise CheckpointError(
            f"{source}: quantization_config.quant_method is {method!r}"
            f" ({_QUANTISATIONS[method]}); {_READABLE}."
        )


def _num_dense_layers(fields: Mapping[str, Any], source: str) -> int:
    """first_k_dense_replace as GLM's `mlp_layer_types` says it: "dense" layers, then "sparse"
    ones.
    """
    kinds, num_layers = fields["mlp_layer_types"], fields.get("num_hidden_layers")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        num_dense = kinds.count("dense")
        if kinds == ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
            return num_dense
    raise CheckpointError(
        f"{source}: mlp_layer_types is {shown(kinds)}; 'dense' for the first layers and 'sparse'"
        f" for all others is needed, one for each of {shown(num_layers)} layers."
    )


def _rope_scaling(fields: Mapping[str, Any], source: str) -> Any:
    # transformers 5 writes `rope_parameters`, older files `rope_scaling`; both hold the same keys.
    raw = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(raw, Mapping):
        return raw
    if (part := raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(
            f"{source}: partial_rotary_factor is {shown(part)}; this architecture needs 1.0."
        )
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
    _check_indexer(config, source)


def _check_indexer(config: ModelConfig, source: str) -> None:
    """Raise CheckpointError for an indexer that cannot be, or that is not known."""
    names = ("index_n_heads", "index_head_dim", "index_topk")
    missing = [name for name in names if getattr(config, name) is None]
    if config.model_type != "deepseek_v32":
        if there := [name for name in names if name not in missing]:
            raise CheckpointError(
                f"{source}: {there[0]} is {getattr(config, there[0])}; with model_type"
                f" {config.model_type!r} no indexer is known."
            )
        return
    if missing:
        raise CheckpointError(f"{source}: {missing[0]} is missing; DeepSeek-V3.2 has an indexer.")
    if config.q_lora_rank is None:
        raise CheckpointError(
            f"{source}: q_lora_rank is None; the indexer's queries are made of the query latent."
        )
    if (config.index_head_dim or 0) < config.qk_rope_head_dim:
        raise CheckpointError(
            f"{source}: index_head_dim {config.index_head_dim} is less than qk_rope_head_dim"
            f" {config.qk_rope_head_dim}, which of it is rotated."
        )

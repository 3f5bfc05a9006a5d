"""The shape of a model of DeepSeek-V3's architecture, read from a Hugging Face `config.json` and
checked key by key.

Does not depend on tensors. Field names are the checkpoint's own, so that a reader can compare the
two. Source of the fields: DeepSeek-V3 technical report (arXiv 2412.19437), sections 2 and 4.2, and
the released config.json. `model_keys` explains each key; `families` names the models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hadal.core import model_keys
from hadal.core.documents import MAX_CONFIG_BYTES, converted, is_file, read_json, shown
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.families import as_v32, check_format, member_of
from hadal.core.key_checks import check_fixed
from hadal.core.model_keys import Use
from hadal.core.quantization import parse_quantization
from hadal.core.rope import RopeScaling, Theta, Tokens, parse_rope

# Maxima are at least 10 times DeepSeek-V3's values. A file beyond them is damaged or malicious, and
# loops and tables of that size would exhaust time and memory.
Layers = Annotated[int, Meta(ge=0, le=1 << 10)]
Width = Annotated[int, Meta(ge=1, le=1 << 17)]
FfnWidth = Annotated[int, Meta(ge=1, le=1 << 20)]
HeadWidth = Annotated[int, Meta(ge=1, le=1 << 14)]
Experts = Annotated[int, Meta(ge=1, le=1 << 14)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 22)]
SCALE_BLOCK = (128, 128)
"""Rows and columns of a matrix that share a scale in every checkpoint DeepSeek released (arXiv
2412.19437, 3.3.2). Kernels accept no other size: a matrix with other blocks is held in FP32.
"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one model. `q_lora_rank` None: queries are projected in one step, without a latent."""

    model_type: str = "deepseek_v3"
    """Key of FAMILY."""
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
    """Heads of the indexer, which chooses the positions that a token attends to (DeepSeek-V3.2).
    None, also for the next two fields: no indexer, and a token attends to all positions.
    """
    index_head_dim: HeadWidth | None = None
    index_topk: Tokens | None = None
    """Maximum number of positions that a token attends to."""
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    rope_theta: Theta = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: Tokens = 4096
    num_nextn_predict_layers: Layers = 0
    mtp_is_moe: bool = True
    """True if MTP layers, which follow the last layer, have experts."""
    eos_token_ids: tuple[TokenId, ...] = (1,)
    weight_block_size: tuple[int, int] | None = None
    """Rows and columns of a block with one FP8 scale (`quantization_config`); None if the weights
    are not quantised.
    """
    scale_names: tuple[str, ...] = ("weight_scale_inv",)
    """Names that the scales of `X.weight` may have, each after the prefix `X.`."""

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
        """Values cached per token and layer: attention's values, then the indexer's key if there is
        one (704 for V3.2).
        """
        return self.latent_dim + (self.index_head_dim or 0)

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(qk_head_dim), times YaRN's attention temperature squared."""
        scale = math.pow(self.qk_head_dim, -0.5)
        return scale if self.rope_scaling is None else scale * self.rope_scaling.softmax_factor

    @property
    def attention_weights(self) -> int:
        """Number of weights of one layer's attention: q_a, q_b, kv_a, kv_b, o_proj, and the
        indexer's if there is one. The indexer projects its queries from the query latent, and its
        key and head weights from the hidden state.
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


_CONFIG = "config.json"
_GENERATION = "generation_config.json"


def read_model_config(folder: Path, accepted: Collection[str] = ()) -> ModelConfig:
    """Read and check `folder/config.json`, and the keys of `generation_config.json` beside it.

    `accepted`: unknown keys to ignore, by the names that a refusal gives (`--accept-config`).
    Raises CheckpointError naming the file and the key.
    """
    fields = _read_fields(folder)
    config = parse_model_config(fields, str(folder / _CONFIG), accepted)
    _check_generation(_read_generation(folder), str(folder / _GENERATION), accepted)
    return config


def unknown_keys(folder: Path, accepted: Collection[str] = ()) -> tuple[str, ...]:
    """Return the top-level keys of config.json and generation_config.json that Hadal does not know
    and therefore ignores, but not the accepted ones. Raises CheckpointError for a file that
    cannot be read, or a model that is not served.
    """
    fields = as_v32(_read_fields(folder))
    member_of(fields, str(folder / _CONFIG))
    table = model_keys.CONFIG[fields["model_type"]]
    generation = model_keys.unknown(_read_generation(folder), model_keys.GENERATION)
    names = [
        *model_keys.unknown(fields, table),
        *(f"generation_config.{key}" for key in generation),
    ]
    return tuple(name for name in names if name not in accepted)


def _read_fields(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    if not is_file(path):
        check_format(folder, None)
    hint = "Point --model at a Hugging Face folder of a DeepSeek-V3 model."
    fields = read_json(
        path, "model configuration", MAX_CONFIG_BYTES, error=CheckpointError, hint=hint
    )
    check_format(folder, fields)
    return fields


def _read_generation(folder: Path) -> dict[str, Any]:
    path = folder / _GENERATION
    if not is_file(path):
        return {}
    return read_json(path, "generation configuration", MAX_CONFIG_BYTES, error=CheckpointError)


def _check_generation(fields: Mapping[str, Any], source: str, accepted: Collection[str]) -> None:
    """Raise CheckpointError for an unsupported key that would change sampling or the end of a text,
    unless it is accepted.
    """
    for key, row in model_keys.GENERATION.items():
        name = f"generation_config.{key}"
        is_refused = row.use is Use.FIXED and not model_keys.is_allowed(row, fields.get(key))
        if is_refused and name not in accepted:
            _, _, effect = row.source.partition(": ")
            raise CheckpointError(
                f"{source}: {key} is {shown(fields[key])}, which {effect} and which Hadal does not"
                f" apply. Requests can set it where the API has it. --accept-config {name} serves"
                " the model without it."
            )


def check_accepted(accepted: Collection[str]) -> None:
    """Raise ConfigError for a name of --accept-config that Hadal reads: accepting it would ignore a
    key that affects tokens.
    """
    known = {key for table in model_keys.CONFIG.values() for key in table}
    for name, table in (
        ("rope_scaling", model_keys.ROPE),
        ("rope_parameters", model_keys.ROPE),
        ("quantization_config", {**model_keys.FP8, **model_keys.COMPRESSED}),
    ):
        known |= {f"{name}.{key}" for key in table}
    for name in accepted:
        if name in known:
            raise ConfigError(
                f"accept_config (--accept-config): {name} is a key that Hadal knows and reads; only"
                " unknown keys and keys of generation_config.json can be accepted."
            )


class _Ends(msgspec.Struct):
    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Meta(min_length=1)] | None


def parse_model_config(
    fields: Mapping[str, Any], source: str, accepted: Collection[str] = ()
) -> ModelConfig:
    """Return the ModelConfig of a config.json's fields; errors (CheckpointError) name `source`."""
    fields = as_v32(fields)
    member_of(fields, source)
    keys = _TopKeys(fields, model_keys.CONFIG[fields["model_type"]], source)
    quantization = parse_quantization(keys.value("quantization_config"), source, accepted)
    keys.check_fixed()
    # Rotation is parsed last: it needs the context, and may need no rope_theta at the top.
    later = {"model_type", "rope_theta", "rope_scaling"}
    values = {
        name: keys.value(name)
        for name in ModelConfig.__dataclass_fields__
        if name in keys.table and name not in later
    }
    ends = converted(
        {"eos_token_id": keys.value("eos_token_id")}, _Ends, source, error=CheckpointError
    )
    values["eos_token_ids"] = (
        (ends.eos_token_id,) if isinstance(ends.eos_token_id, int) else ends.eos_token_id or ()
    )
    values["model_type"] = fields["model_type"]
    values["first_k_dense_replace"] = keys.num_dense_layers(values["num_hidden_layers"])
    if quantization is not None:
        values["weight_block_size"] = quantization.block
        values["scale_names"] = quantization.scale_names
    config = converted(values, ModelConfig, source, error=CheckpointError)
    theta, scaling = parse_rope(
        {name: keys.value(name) for name in ("rope_scaling", "rope_parameters")},
        lambda: keys.value("rope_theta"),
        keys.value("original_max_position_embeddings"),
        config.max_position_embeddings,
        source,
        accepted,
    )
    config = replace(config, rope_theta=theta, rope_scaling=scaling)
    keys.check_restatements(config)
    _check(config, source)
    return config


@dataclass(frozen=True)
class _TopKeys:
    """Top-level keys of one config.json, read by the rules in `table`."""

    fields: Mapping[str, Any]
    table: model_keys.Table
    source: str

    def value(self, key: str) -> Any:
        """Return a USED key's value, that of its alias, or the family's default. Raises
        CheckpointError if key and alias differ, or if a required key is missing.
        """
        row = self.table[key]
        stated = [
            name
            for name in (key, *self._aliases(key))
            if name in self.fields and row.use is Use.USED
        ]
        for name in stated[1:]:
            if self.fields[name] != self.fields[stated[0]]:
                raise self._differ(name, stated[0], self.fields[stated[0]])
        if stated:
            return self.fields[stated[0]]
        if row.default is model_keys.REQUIRED:
            raise CheckpointError(
                f"{self.source}: {key} is missing, and {self.fields['model_type']!r} has no default"
                " for it. Add it as the model's maker states it."
            )
        return row.default

    def check_fixed(self) -> None:
        for key, row in self.table.items():
            if row.use is Use.FIXED:
                check_fixed(self.fields, key, row, self.source, key)

    def check_restatements(self, config: ModelConfig) -> None:
        """Raise CheckpointError if a SAME key states a value other than the key it restates."""
        for key, row in self.table.items():
            if row.use is not Use.SAME or self.fields.get(key) is None:
                continue
            found, of = self.fields[key], row.of
            if key == "mlp_layer_types":
                found = self._count_dense(found, config.num_hidden_layers)
            name = "first_k_dense_replace" if of == "mlp_layer_types" else of
            value = getattr(config, name)
            if name == "first_k_dense_replace":
                value = min(value, config.num_hidden_layers)
            if found != value:
                raise self._differ(key, of, value)

    def num_dense_layers(self, num_layers: Any) -> Any:
        """Return first_k_dense_replace, which some families state as `mlp_layer_types`."""
        key = "mlp_layer_types"
        row = self.table[key]
        if row.use in (Use.USED, Use.ALIAS) and self.fields.get(key) is not None:
            num_dense = self._count_dense(self.fields[key], num_layers)
            stated = self.fields.get("first_k_dense_replace")
            is_both = row.use is Use.ALIAS and stated is not None
            if is_both and (type(stated) is not int or min(stated, num_layers) != num_dense):
                raise self._differ("first_k_dense_replace", key, num_dense)
            return num_dense
        if row.use is Use.USED or "first_k_dense_replace" not in self.table:
            return 1
        return self.value("first_k_dense_replace")

    def _count_dense(self, kinds: Any, num_layers: Any) -> int:
        """Return the number of "dense" layers; "sparse" ones must follow them."""
        if isinstance(kinds, list) and len(kinds) == num_layers:
            num_dense = kinds.count("dense")
            if kinds == ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
                return num_dense
        raise CheckpointError(
            f"{self.source}: mlp_layer_types is {shown(kinds)}; 'dense' for the first layers and"
            f" 'sparse' for all others is needed, one for each of {shown(num_layers)} layers."
        )

    def _aliases(self, key: str) -> list[str]:
        return [
            name
            for name, row in self.table.items()
            if row.use is Use.ALIAS and row.of == key and name != "mlp_layer_types"
        ]

    def _differ(self, key: str, of: str, value: Any) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {key} is {shown(self.fields[key])}, and {of} says {shown(value)}:"
            " both must state the same value. Remove the wrong one."
        )


def _check(config: ModelConfig, source: str) -> None:
    """Raise CheckpointError for fields that contradict each other."""
    if config.qk_rope_head_dim % 2:
        raise CheckpointError(
            f"{source}: qk_rope_head_dim is {config.qk_rope_head_dim}; it must be even."
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
            " experts of topk_group groups."
        )
    if config.n_routed_experts // config.n_group < 2 and config.n_group > 1:
        raise CheckpointError(
            f"{source}: each of the n_group groups needs two experts: its two highest scores are summed."
        )
    _check_indexer(config, source)


def _check_indexer(config: ModelConfig, source: str) -> None:
    """Raise CheckpointError for an indexer with missing or impossible fields."""
    if config.model_type != "deepseek_v32":
        return
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        if getattr(config, name) is None:
            raise CheckpointError(f"{source}: {name} is None; DeepSeek-V3.2 has an indexer.")
    if config.q_lora_rank is None:
        raise CheckpointError(
            f"{source}: q_lora_rank is None; the indexer's queries are computed from that latent."
        )
    if (config.index_head_dim or 0) < config.qk_rope_head_dim:
        raise CheckpointError(
            f"{source}: index_head_dim {config.index_head_dim} is less than qk_rope_head_dim"
            f" {config.qk_rope_head_dim}, the part of it that is rotated."
        )

"""Tables of every key of config.json (by family) and generation_config.json that Hadal knows.

`Use` lists the effects that a key can have. A key that is not in the table is unknown:
the reader refuses it inside an object that shapes the computation, and lists it if it is a
top-level key.

Sources: the configuration classes of transformers 5.23 (`models/*/configuration_*.py`), its rope
functions (`modeling_rope_utils.py`) and its quantisation classes (`utils/quantization_config.py`).
For families without a class there, the table has no default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Use(StrEnum):
    """Effect of a key in Hadal."""

    USED = "used"
    """The value shapes the computation, the context or the end of a text."""
    FIXED = "fixed"
    """Only the values in `allowed` are served; any other is refused."""
    ALIAS = "alias"
    """Another name of the key `of`: its value is used if that key is absent."""
    SAME = "same"
    """A restatement of the key `of`: refused if the two differ, never used."""
    SELECTS = "selects"
    """The value names the family or the format, and so selects the table for other keys."""
    INERT = "inert"
    """The value does not affect tokens; `source` says why."""


REQUIRED: Final = "required"
"""Default of a key that a file must have. No key has this text as its value."""


@dataclass(frozen=True)
class ConfigKey:
    """One row of the table."""

    use: Use
    source: str
    """Origin of the default or of the meaning."""
    default: Any = None
    """Value used if the key is absent; REQUIRED: the file is refused without it."""
    allowed: tuple[Any, ...] = ()
    """Supported values of a FIXED key. If the value is a list, every entry must be one of them."""
    of: str = ""
    """Key that an ALIAS or a SAME key stands for."""


Table = dict[str, ConfigKey]

V3, V32, GLM, KIMI, JOYAI = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "kimi_k2",
    "joyai_llm_flash",
)
_CLASSES = {V3: "DeepseekV3Config", V32: "DeepseekV32Config", GLM: "Glm4MoeLiteConfig"}
_NO_CLASS = "no class in transformers: the maker's file states it"

_DEFAULTS: dict[str, tuple[Any, Any, Any]] = {
    "vocab_size": (129280, 129280, 154880),
    "hidden_size": (7168, 7168, 2048),
    "intermediate_size": (18432, 18432, 10240),
    "moe_intermediate_size": (2048, 2048, 1536),
    "num_hidden_layers": (61, 61, 47),
    "num_attention_heads": (128, 128, 20),
    "n_shared_experts": (1, 1, 1),
    "n_routed_experts": (256, 256, 64),
    "num_experts_per_tok": (8, 8, 4),
    "n_group": (8, 8, 1),
    "topk_group": (4, 4, 1),
    "norm_topk_prob": (True, True, True),
    "routed_scaling_factor": (2.5, 2.5, 1.8),
    "q_lora_rank": (1536, 1536, 768),
    "kv_lora_rank": (512, 512, 512),
    "qk_nope_head_dim": (128, 128, 192),
    "qk_rope_head_dim": (64, 64, 64),
    "v_head_dim": (128, 128, 256),
    "rms_norm_eps": (1e-6, 1e-6, 1e-5),
    "max_position_embeddings": (4096, 163840, 202752),
    "rope_theta": (10000.0, 10000.0, 10000.0),
    "eos_token_id": (1, 1, 1),
}
"""Key -> default of DeepseekV3Config, DeepseekV32Config and Glm4MoeLiteConfig. `rope_theta` is
that of RotaryEmbeddingConfigMixin, which all three inherit.
"""

_OFF = "off where absent, as in every class of the architecture"
_ABSENT: Table = {
    "model_type": ConfigKey(Use.SELECTS, "AutoConfig", REQUIRED),
    "architectures": ConfigKey(Use.SELECTS, "AutoModelForCausalLM"),
    "rope_scaling": ConfigKey(Use.USED, "convert_rope_params_to_dict: goes before rope_parameters"),
    "rope_parameters": ConfigKey(Use.USED, _OFF),
    "original_max_position_embeddings": ConfigKey(
        Use.USED, "standardize_rope_params: goes before the one in rope_parameters"
    ),
    "quantization_config": ConfigKey(Use.USED, _OFF),
    "num_nextn_predict_layers": ConfigKey(
        Use.USED, f"drafts alone, which change no token; {_OFF}", 0
    ),
    "num_local_experts": ConfigKey(
        Use.ALIAS, "attribute_map of all classes", of="n_routed_experts"
    ),
}
"""Keys of every family, all optional except `model_type`."""

_V3_CODE = "the architecture: DeepSeek's modeling_deepseek.py raises for others or never reads it"
_NO_BIAS = "tensors of biases are not read"
_MACHINERY = "steers masks, caches or the file itself in transformers; never set for this family"
_FIXED: Table = {
    "scoring_func": ConfigKey(Use.FIXED, _V3_CODE, "sigmoid", ("sigmoid",)),
    "topk_method": ConfigKey(Use.FIXED, _V3_CODE, "noaux_tc", ("noaux_tc",)),
    "moe_layer_freq": ConfigKey(Use.FIXED, _V3_CODE, 1, (1,)),
    # ACT2FN has the same function under both names.
    "hidden_act": ConfigKey(Use.FIXED, "default of all classes", "silu", ("silu", "swish")),
    "attention_bias": ConfigKey(Use.FIXED, _NO_BIAS, False, (False,)),
    "mlp_bias": ConfigKey(Use.FIXED, _NO_BIAS, False, (False,)),
    "tie_word_embeddings": ConfigKey(
        Use.FIXED, "the head is read as lm_head.weight", False, (False,)
    ),
    "rope_interleave": ConfigKey(Use.FIXED, "rotation is of neighbours (x0, x1)", True, (True,)),
    "partial_rotary_factor": ConfigKey(
        Use.FIXED, "all of qk_rope_head_dim is rotated", 1.0, (1.0, 1)
    ),
    "is_causal": ConfigKey(Use.FIXED, _MACHINERY, True, (True,)),
    "is_encoder_decoder": ConfigKey(Use.FIXED, _MACHINERY, False, (False,)),
    "sliding_window": ConfigKey(Use.FIXED, _MACHINERY, None, (None,)),
    "attention_chunk_size": ConfigKey(Use.FIXED, _MACHINERY, None, (None,)),
    "kv_sharing_modes": ConfigKey(Use.FIXED, _MACHINERY, None, (None,)),
    "per_layer_config": ConfigKey(Use.FIXED, _MACHINERY, None, (None,)),
    "configuration_files": ConfigKey(
        Use.FIXED, "names another file to read instead", None, (None,)
    ),
    "text_config": ConfigKey(Use.FIXED, _MACHINERY, None, (None,)),
    "text_encoder": ConfigKey(Use.FIXED, _MACHINERY, None, (None,)),
    "decoder": ConfigKey(Use.FIXED, _MACHINERY, None, (None,)),
    "generator": ConfigKey(Use.FIXED, _MACHINERY, None, (None,)),
    "compression_config": ConfigKey(
        Use.FIXED, "an older name of a quantization_config", None, (None,)
    ),
    "quantization": ConfigKey(
        Use.FIXED,
        "MLX's weights are not read: take the repository that they were made from",
        None,
        (None,),
    ),
    "layer_types": ConfigKey(
        Use.FIXED, "every layer attends alike", None, (None, "full_attention", "attention")
    ),
    "index_n_heads": ConfigKey(Use.FIXED, "no indexer in this family", None, (None,)),
    "index_head_dim": ConfigKey(Use.FIXED, "no indexer in this family", None, (None,)),
    "index_topk": ConfigKey(Use.FIXED, "no indexer in this family", None, (None,)),
}

_GENERATION = "PreTrainedConfig drops it; generation_config.json has such keys"
_INERT: dict[str, tuple[str, ...]] = {
    "names the writer or the code of the file": (
        "auto_map",
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "tokenizer_class",
        "unsloth_fixed",
    ),
    "training alone": (
        "attention_dropout",
        "initializer_range",
        "aux_loss_alpha",
        "seq_aux",
        "router_aux_loss_coef",
        "output_router_logits",
        "pretraining_tp",
        "ep_size",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
    ),
    "how transformers computes or answers, not what": (
        "use_cache",
        "attn_implementation",
        "experts_implementation",
        "_attn_implementation_autoset",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
    ),
    "the files say the type of each tensor, the deployment that of the computation": (
        "dtype",
        "torch_dtype",
    ),
    "MLA has a key and a value for each head; no modeling code groups them": (
        "num_key_value_heads",
    ),
    "every class adds its two parts": ("qk_head_dim",),
    "the tokenizer's files say how a text begins and is padded": (
        "bos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
    ),
    _GENERATION: (
        "max_length",
        "min_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "num_beams",
        "no_repeat_ngram_size",
        "num_return_sequences",
    ),
}
"""Reason -> top-level keys of config.json that do not affect tokens."""


def _common() -> Table:
    inert = {key: ConfigKey(Use.INERT, reason) for reason, keys in _INERT.items() for key in keys}
    return {**inert, **_FIXED, **_ABSENT}


def _with_class(family: str, column: int) -> Table:
    used = {
        key: ConfigKey(Use.USED, f"default of {_CLASSES[family]}", defaults[column])
        for key, defaults in _DEFAULTS.items()
    }
    return {**_common(), **used}


def _without_class() -> Table:
    used = {key: ConfigKey(Use.USED, _NO_CLASS, REQUIRED) for key in _DEFAULTS}
    return {
        **_common(),
        **used,
        "first_k_dense_replace": ConfigKey(Use.USED, _NO_CLASS, REQUIRED),
        "mlp_layer_types": ConfigKey(Use.SAME, _DENSE_FIRST, of="first_k_dense_replace"),
        "head_dim": ConfigKey(Use.SAME, "what rotates", of="qk_rope_head_dim"),
        "num_experts": ConfigKey(Use.SAME, "a name of other families", of="n_routed_experts"),
    }


_DENSE_FIRST = "states the number of dense layers, which come first"
_KEYS_OF_V3: Table = {
    "num_nextn_predict_layers": ConfigKey(Use.USED, "num_mtp_layers of DeepseekV3Config", 1),
    "num_mtp_layers": ConfigKey(
        Use.ALIAS, "attribute_map of DeepseekV3Config", of="num_nextn_predict_layers"
    ),
    "first_k_dense_replace": ConfigKey(Use.USED, "default of DeepseekV3Config", 3),
    "mlp_layer_types": ConfigKey(Use.SAME, _DENSE_FIRST, of="first_k_dense_replace"),
    "head_dim": ConfigKey(
        Use.SAME, "DeepseekV3Config rotates so many values", of="qk_rope_head_dim"
    ),
    "index_topk": ConfigKey(
        Use.USED, "makes the file one of V3.2 under V3's name: families.as_v32"
    ),
    "num_experts": ConfigKey(Use.SAME, "a name of other families", of="n_routed_experts"),
}
_KEYS_OF_V32: Table = {
    "first_k_dense_replace": ConfigKey(Use.USED, "default of DeepseekV32Config", 3),
    "mlp_layer_types": ConfigKey(
        Use.ALIAS, f"DeepseekV32Config; {_DENSE_FIRST}", of="first_k_dense_replace"
    ),
    "head_dim": ConfigKey(Use.INERT, "DeepseekV32Config replaces it by qk_rope_head_dim"),
    "num_experts": ConfigKey(Use.ALIAS, "DeepseekV32Config.__post_init__", of="n_routed_experts"),
    "index_n_heads": ConfigKey(Use.USED, "default of DeepseekV32Config", 64),
    "index_head_dim": ConfigKey(Use.USED, "default of DeepseekV32Config", 128),
    "index_topk": ConfigKey(Use.USED, "default of DeepseekV32Config", 2048),
    "layer_types": ConfigKey(
        Use.FIXED,
        "DeepseekV32Config: every layer has the indexer",
        None,
        (None, "indexed_attention", "deepseek_sparse_attention"),
    ),
}
_KEYS_OF_GLM: Table = {
    "mlp_layer_types": ConfigKey(Use.USED, "Glm4MoeLiteConfig: the first layer is dense", None),
    "first_k_dense_replace": ConfigKey(
        Use.SAME, "not in Glm4MoeLiteConfig; states mlp_layer_types", of="mlp_layer_types"
    ),
    "head_dim": ConfigKey(Use.ALIAS, "attribute_map of Glm4MoeLiteConfig", of="qk_rope_head_dim"),
    "num_experts": ConfigKey(Use.SAME, "a name of other families", of="n_routed_experts"),
}

CONFIG: dict[str, Table] = {
    V3: {**_with_class(V3, 0), **_KEYS_OF_V3},
    V32: {**_with_class(V32, 1), **_KEYS_OF_V32},
    GLM: {**_with_class(GLM, 2), **_KEYS_OF_GLM},
    KIMI: _without_class(),
    JOYAI: {
        **_without_class(),
        # Affects drafts only.
        "mtp_is_moe": ConfigKey(Use.USED, "SGLang's joyai_llm_flash_nextn.py", False),
    },
}
"""Family (`model_type`) -> top-level key of config.json -> row."""

_YARN = "_compute_yarn_parameters"
ROPE: Table = {
    "rope_type": ConfigKey(Use.USED, "standardize_rope_params", "default"),
    "type": ConfigKey(Use.ALIAS, "standardize_rope_params", of="rope_type"),
    "rope_theta": ConfigKey(Use.USED, "goes before rope_theta at the top of the file"),
    "partial_rotary_factor": ConfigKey(
        Use.FIXED, "all of qk_rope_head_dim is rotated", 1.0, (1.0, 1)
    ),
    "factor": ConfigKey(Use.USED, _YARN, REQUIRED),
    "original_max_position_embeddings": ConfigKey(Use.USED, f"{_YARN}; max_position_embeddings"),
    "attention_factor": ConfigKey(Use.USED, f"{_YARN}; made of the mscales"),
    "beta_fast": ConfigKey(Use.USED, _YARN, 32.0),
    "beta_slow": ConfigKey(Use.USED, _YARN, 1.0),
    "mscale": ConfigKey(Use.USED, _YARN),
    "mscale_all_dim": ConfigKey(Use.USED, f"{_YARN}; yarn_apply_mscale"),
    "truncate": ConfigKey(Use.USED, _YARN, True),
}
"""Key of `rope_parameters` or `rope_scaling` -> row, for all families. The rows after
`partial_rotary_factor` are YaRN's; transformers reads them for no other type.
"""

_TENSORS_SAY = "the files say the type of each tensor"
_COMPUTE_SAYS = "activations are rounded as the deployment's `compute` says"
FP8: Table = {
    "quant_method": ConfigKey(Use.SELECTS, "FineGrainedFP8Config", REQUIRED),
    "weight_block_size": ConfigKey(Use.USED, "default of FineGrainedFP8Config", (128, 128)),
    "fmt": ConfigKey(Use.FIXED, "DeepSeek-V3's file", "e4m3", ("e4m3",)),
    # Scales of ue8m0 are powers of two, read like any other numbers.
    "scale_fmt": ConfigKey(Use.FIXED, "FineGrainedFP8Config", "float", ("float", "ue8m0", None)),
    "expert_dtype": ConfigKey(Use.FIXED, "FineGrainedFP8Config", "fp8", ("fp8", None)),
    "activation_scheme": ConfigKey(Use.FIXED, _COMPUTE_SAYS, "dynamic", ("dynamic", "static")),
    "modules_to_not_convert": ConfigKey(Use.INERT, _TENSORS_SAY),
    "modules_to_convert": ConfigKey(Use.INERT, _TENSORS_SAY),
    "ignored_layers": ConfigKey(Use.INERT, _TENSORS_SAY),
    "dequantize": ConfigKey(Use.INERT, "how transformers holds the weights"),
}
"""Key of a quantization_config with quant_method "fp8" -> row."""

_COMPRESSED = "compressed-tensors' QuantizationConfig"
COMPRESSED: Table = {
    "quant_method": ConfigKey(Use.SELECTS, _COMPRESSED, REQUIRED),
    "format": ConfigKey(Use.SELECTS, _COMPRESSED, REQUIRED),
    "quantization_status": ConfigKey(
        Use.FIXED, _COMPRESSED, "compressed", ("compressed", "frozen")
    ),
    "config_groups": ConfigKey(Use.USED, _COMPRESSED, REQUIRED),
    "kv_cache_scheme": ConfigKey(Use.FIXED, _COMPRESSED, None, (None,)),
    "sparsity_config": ConfigKey(Use.FIXED, _COMPRESSED, None, (None,)),
    "transform_config": ConfigKey(Use.FIXED, _COMPRESSED, None, (None,)),
    "ignore": ConfigKey(Use.INERT, _TENSORS_SAY),
    "global_compression_ratio": ConfigKey(Use.INERT, "a note of the writer"),
    "version": ConfigKey(Use.INERT, "a note of the writer"),
}
"""Key of a quantization_config with quant_method "compressed-tensors" -> row."""
COMPRESSED_GROUP: Table = {
    "weights": ConfigKey(Use.USED, _COMPRESSED, REQUIRED),
    "format": ConfigKey(Use.FIXED, _COMPRESSED, None, (None, "float-quantized")),
    "output_activations": ConfigKey(Use.FIXED, _COMPRESSED, None, (None,)),
    "input_activations": ConfigKey(Use.INERT, _COMPUTE_SAYS),
    "targets": ConfigKey(Use.INERT, _TENSORS_SAY),
}
"""Key of an entry of `config_groups` -> row."""
COMPRESSED_WEIGHTS: Table = {
    "num_bits": ConfigKey(Use.FIXED, _COMPRESSED, REQUIRED, (8,)),
    "type": ConfigKey(Use.FIXED, _COMPRESSED, REQUIRED, ("float",)),
    "strategy": ConfigKey(Use.FIXED, _COMPRESSED, REQUIRED, ("block",)),
    "block_structure": ConfigKey(Use.USED, _COMPRESSED, REQUIRED),
    "symmetric": ConfigKey(Use.FIXED, _COMPRESSED, True, (True,)),
    "dynamic": ConfigKey(Use.FIXED, _COMPRESSED, False, (False,)),
    "group_size": ConfigKey(Use.FIXED, _COMPRESSED, None, (None,)),
    "actorder": ConfigKey(Use.FIXED, _COMPRESSED, None, (None, False)),
    "observer": ConfigKey(Use.INERT, "how scales were found"),
    "observer_kwargs": ConfigKey(Use.INERT, "how scales were found"),
    "scale_dtype": ConfigKey(Use.INERT, _TENSORS_SAY),
    "zp_dtype": ConfigKey(Use.INERT, "symmetric: there are no zero points"),
}
"""Key of `weights` in an entry of `config_groups` -> row."""

_DRAW = "GenerationConfig: changes a draw"
_END = "GenerationConfig: changes the end of a text"
_BEAMS = "beam search alone, which num_beams refuses"
_ASSISTANT = "assisted generation changes no token"
_GENERATE = "how transformers' generate works or answers, not what"
_GENERATION_INERT: dict[str, tuple[str, ...]] = {
    "names the writer of the file": ("_from_model_config", "transformers_version"),
    "the tokenizer's files say how a text begins and is padded": (
        "bos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
    ),
    _BEAMS: ("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
    "models with an encoder alone": (
        "encoder_repetition_penalty",
        "encoder_no_repeat_ngram_size",
    ),
    _ASSISTANT: (
        "use_mtp",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "target_lookbehind",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "speculation_type",
    ),
    _GENERATE: (
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "return_legacy_cache",
        "prefill_chunk_size",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "renormalize_logits",
        "remove_invalid_values",
        "compile_config",
        "continuous_batching_config",
        "disable_compile",
        "low_memory",
        "trust_remote_code",
    ),
}
GENERATION: Table = {
    **{
        key: ConfigKey(Use.INERT, reason)
        for reason, keys in _GENERATION_INERT.items()
        for key in keys
    },
    "eos_token_id": ConfigKey(Use.USED, _END),
    "do_sample": ConfigKey(Use.USED, _DRAW),
    "temperature": ConfigKey(Use.USED, _DRAW, 1.0),
    "top_p": ConfigKey(Use.USED, _DRAW, 1.0),
    "top_k": ConfigKey(Use.USED, _DRAW, 0),
    "max_length": ConfigKey(Use.USED, "GenerationConfig: prompt and output together"),
    "min_p": ConfigKey(Use.FIXED, _DRAW, None, (None, 0)),
    "top_h": ConfigKey(Use.FIXED, _DRAW, None, (None, 1)),
    "typical_p": ConfigKey(Use.FIXED, _DRAW, None, (None, 1)),
    "epsilon_cutoff": ConfigKey(Use.FIXED, _DRAW, None, (None, 0)),
    "eta_cutoff": ConfigKey(Use.FIXED, _DRAW, None, (None, 0)),
    "repetition_penalty": ConfigKey(Use.FIXED, _DRAW, None, (None, 1)),
    "presence_penalty": ConfigKey(Use.FIXED, "other engines: changes a draw", None, (None, 0)),
    "frequency_penalty": ConfigKey(Use.FIXED, "other engines: changes a draw", None, (None, 0)),
    "no_repeat_ngram_size": ConfigKey(Use.FIXED, _DRAW, None, (None, 0)),
    "bad_words_ids": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "sequence_bias": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "suppress_tokens": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "begin_suppress_tokens": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "forced_bos_token_id": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "forced_eos_token_id": ConfigKey(Use.FIXED, _END, None, (None,)),
    "forced_decoder_ids": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "exponential_decay_length_penalty": ConfigKey(Use.FIXED, _END, None, (None,)),
    "num_beams": ConfigKey(Use.FIXED, _DRAW, None, (None, 1)),
    "constraints": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "force_words_ids": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "penalty_alpha": ConfigKey(Use.FIXED, _DRAW, None, (None, 0)),
    "dola_layers": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "guidance_scale": ConfigKey(Use.FIXED, _DRAW, None, (None, 1)),
    "watermarking_config": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "token_healing": ConfigKey(Use.FIXED, _DRAW, None, (None, False)),
    "assistant_ensemble_weight": ConfigKey(Use.FIXED, _DRAW, None, (None,)),
    "max_new_tokens": ConfigKey(Use.FIXED, _END, None, (None,)),
    "min_new_tokens": ConfigKey(Use.FIXED, _END, None, (None, 0)),
    "min_length": ConfigKey(Use.FIXED, _END, None, (None, 0)),
    "max_time": ConfigKey(Use.FIXED, _END, None, (None,)),
    "stop_strings": ConfigKey(Use.FIXED, _END, None, (None,)),
}
"""Key of generation_config.json -> row."""


def is_allowed(row: ConfigKey, value: Any) -> bool:
    """Return True if a FIXED key may have the value; for a list, if each entry may."""
    if value in ([], {}) and None in row.allowed:
        return True  # Counts as absent.
    if isinstance(value, list) and value:
        return all(is_allowed(row, one) for one in value)
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in row.allowed
    )


def unknown(fields: Mapping[str, Any], table: Table) -> list[str]:
    """Return the keys that are not in the table, in the file's order."""
    return [key for key in fields if key not in table]

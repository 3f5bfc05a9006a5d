"""Values that a drawn config.json may have for each key of the table."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Draw = Callable[[random.Random], Any]


def _one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


BASE: dict[str, Draw] = {
    "vocab_size": _one_of(96, 128, 130),
    "hidden_size": _one_of(32, 48, 40),
    "intermediate_size": _one_of(48, 64),
    "moe_intermediate_size": _one_of(16, 24),
    "num_hidden_layers": _one_of(2, 3, 3, 4),
    "num_attention_heads": _one_of(2, 4, 5),
    "n_shared_experts": _one_of(1, 1, 2),
    "n_routed_experts": _one_of(16, 32),
    "n_group": _one_of(1, 2, 4, 8),
    "q_lora_rank": _one_of(16, 24),
    "kv_lora_rank": _one_of(16, 32),
    "qk_nope_head_dim": _one_of(8, 16),
    "qk_rope_head_dim": _one_of(8, 16),
    "v_head_dim": _one_of(8, 16, 24),
    "norm_topk_prob": _one_of(True, False),
    "routed_scaling_factor": _one_of(1.0, 1.7, 2.5, 3.0),
    "rms_norm_eps": _one_of(1e-6, 1e-5, 1e-2, 5e-2),
    "max_position_embeddings": _one_of(128, 256, 512, 1000),
    "eos_token_id": _one_of(1, 2, [3, 4], 9),
}
"""Key -> small values for every family. Keys that depend on others are drawn in `cases`."""

INERT: dict[str, Draw] = {
    "auto_map": _one_of({"AutoConfig": "configuration_deepseek.DeepseekV3Config"}),
    "transformers_version": _one_of("4.33.1", "4.57.0"),
    "_name_or_path": _one_of("a/b"),
    "name_or_path": _one_of("a/b"),
    "_commit_hash": _one_of("0123"),
    "tokenizer_class": _one_of("LlamaTokenizerFast"),
    "unsloth_fixed": _one_of(True),
    "attention_dropout": _one_of(0.1, 0.5),
    "initializer_range": _one_of(0.006, 0.1),
    "aux_loss_alpha": _one_of(0.001, 0.1),
    "seq_aux": _one_of(True, False),
    "router_aux_loss_coef": _one_of(0.01),
    "output_router_logits": _one_of(True),
    "pretraining_tp": _one_of(2, 4),
    "ep_size": _one_of(1, 8),
    "id2label": _one_of({"0": "a", "1": "b", "2": "c"}),
    "label2id": _one_of({"a": 0, "b": 1, "c": 2}),
    "num_labels": _one_of(3, 5),
    "problem_type": _one_of("regression"),
    "use_cache": _one_of(False),
    "attn_implementation": _one_of("eager", "sdpa"),
    "experts_implementation": _one_of("eager"),
    "_attn_implementation_autoset": _one_of(True),
    "output_attentions": _one_of(True),
    "output_hidden_states": _one_of(True),
    "return_dict": _one_of(False),
    "chunk_size_feed_forward": _one_of(2, 8),
    "dtype": _one_of("bfloat16", "float16"),
    "torch_dtype": _one_of("bfloat16", "float16"),
    "qk_head_dim": _one_of(7, 192),
    "bos_token_id": _one_of(5, 11),
    "pad_token_id": _one_of(2, 7),
    "unk_token_id": _one_of(2),
    "sep_token_id": _one_of(3),
    "decoder_start_token_id": _one_of(3),
    "max_length": _one_of(50, 4096),
    "min_length": _one_of(3),
    "do_sample": _one_of(True),
    "temperature": _one_of(0.3),
    "top_k": _one_of(20),
    "top_p": _one_of(0.9),
    "typical_p": _one_of(0.9),
    "repetition_penalty": _one_of(1.2),
    "length_penalty": _one_of(1.2),
    "num_beams": _one_of(4),
    "no_repeat_ngram_size": _one_of(3),
    "num_return_sequences": _one_of(2),
    "head_dim": _one_of(7, 192),
}
"""Key -> values other than its default. `num_key_value_heads` is absent: transformers can only run
the number of heads, so `cases` draws numbers that it treats as that.
"""

FIXED: dict[str, Any] = {
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "moe_layer_freq": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "rope_interleave": False,
    "partial_rotary_factor": 0.5,
    "is_causal": False,
    "is_encoder_decoder": True,
    "sliding_window": 64,
    "attention_chunk_size": 64,
    "kv_sharing_modes": ["reuse", "reuse"],
    "per_layer_config": {"0": {"rms_norm_eps": 0.5}},
    "configuration_files": ["config.4.0.0.json"],
    "text_config": {"hidden_size": 8},
    "text_encoder": {"hidden_size": 8},
    "decoder": {"hidden_size": 8},
    "generator": {"hidden_size": 8},
    "compression_config": {"quant_method": "compressed-tensors"},
    "quantization": {"group_size": 64, "bits": 4},
    "layer_types": ["sliding_attention", "full_attention"],
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 16,
}
"""FIXED key -> a value that is not served."""

ROPE: dict[str, Draw] = {
    "factor": _one_of(1.0, 2.0, 4.0, 40.0, 0.5),
    "original_max_position_embeddings": _one_of(16, 32, 64, 128),
    "attention_factor": _one_of(0.5, 1.3, 1.0, 0.0, None),
    "beta_fast": _one_of(1.0, 4, 16.0, 64.0, 0, None),
    "beta_slow": _one_of(0.25, 1, 2.0, 0, None),
    "mscale": _one_of(0.7, 1.0, 0, None),
    "mscale_all_dim": _one_of(0.9, 1.0, 0, None),
    "truncate": _one_of(False, True, None),
}
"""YaRN's keys."""
THETAS = (100.0, 1000.0, 5000.0, 10000.0, 50000.0)

UNKNOWN_AT_TOP = ("num_memory_tokens", "my_note", "quant_library", "router_dtype")
UNKNOWN_IN_ROPE = ("mrope_section", "short_factor", "high_freq_factor", "finetuned", "alpha")
UNKNOWN_IN_QUANTIZATION = ("kv_cache_quant_algo", "zero_point", "weight_transform", "packed")

FP8_ALLOWED: dict[str, Draw] = {
    "fmt": _one_of("e4m3"),
    "scale_fmt": _one_of("ue8m0", "float", None),
    "expert_dtype": _one_of("fp8", None),
    "activation_scheme": _one_of("static", "dynamic"),
    "modules_to_not_convert": _one_of(None, ["lm_head"]),
    "modules_to_convert": _one_of(None, ["model.embed_tokens"]),
    "ignored_layers": _one_of(["lm_head"]),
    "dequantize": _one_of(True, False),
    "weight_block_size": _one_of([128, 128], [16, 16]),
}
FP8_REFUSED: dict[str, Any] = {
    "fmt": "e5m2",
    "scale_fmt": "e5m2",
    "expert_dtype": "fp4",
    "activation_scheme": "block",
    "weight_block_size": None,
}
COMPRESSED_ALLOWED: dict[str, Draw] = {
    "quantization_status": _one_of("compressed", "frozen"),
    "kv_cache_scheme": _one_of(None),
    "sparsity_config": _one_of({}, None),
    "transform_config": _one_of({}, None),
    "ignore": _one_of(["lm_head"], []),
    "global_compression_ratio": _one_of(None, 1.5),
    "version": _one_of("0.12.2"),
}
COMPRESSED_REFUSED: dict[str, Any] = {
    "format": "pack-quantized",
    "quantization_status": "initialized",
    "kv_cache_scheme": {"num_bits": 8},
    "sparsity_config": {"format": "sparse-24-bitmask"},
    "transform_config": {"config_groups": {"R1": {}}},
}
WEIGHTS_ALLOWED: dict[str, Draw] = {
    "symmetric": _one_of(True),
    "dynamic": _one_of(False),
    "group_size": _one_of(None),
    "actorder": _one_of(None, False),
    "observer": _one_of("minmax", "static_minmax"),
    "observer_kwargs": _one_of({}, {"a": 1}),
    "scale_dtype": _one_of(None, "torch.float32"),
    "zp_dtype": _one_of(None, "torch.float8_e4m3fn"),
    "block_structure": _one_of([128, 128], [16, 16], "128x128"),
}
WEIGHTS_REFUSED: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "strategy": "channel",
    "symmetric": False,
    "dynamic": True,
    "group_size": 128,
    "actorder": "group",
}
GROUP_ALLOWED: dict[str, Draw] = {
    "format": _one_of("float-quantized", None),
    "output_activations": _one_of(None),
    "input_activations": _one_of(None, {"num_bits": 8, "type": "float", "dynamic": True}),
    "targets": _one_of(["Linear"]),
}
GROUP_REFUSED: dict[str, Any] = {
    "format": "pack-quantized",
    "output_activations": {"num_bits": 8},
}

"""Model fields of the config.json of each supported model, and small models with the same fields.

The models' folders were not available, so each field is quoted from public repositories.
DeepSeek-V3's file is in configs/. Kimi-K2: ik_llama.cpp's metadata and a report of its config
(beta_fast is 1). DeepSeek-V3.2: transformers' defaults, and DeepSeek's own code for its fields
beyond V3.1. Moonlight: llama.cpp's metadata and reports of its config; its scaling factor from
memory. GLM-4.7-Flash: vLLM's tests and transformers' defaults; its begin and end ids from memory.
JoyAI-LLM-Flash: SGLang's code for attention and widths; its experts, theta and context from memory.
GigaChat3: layers and experts from a report, the rest from memory. All give the parameter counts
that their makers publish (tests/unit/commands/test_model.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_V3: dict[str, Any] = json.loads((ROOT / "configs" / "deepseek_v3" / "config.json").read_text())
_FP8: dict[str, Any] = _V3["quantization_config"]
_ALIKE: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "num_nextn_predict_layers": 0,
    "n_shared_experts": 1,
}
"""Fields that most models besides DeepSeek's own share."""

CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": _V3,
    "DeepSeek-V3.1": {**_V3, "quantization_config": {**_FP8, "scale_fmt": "ue8m0"}},
    "DeepSeek-V3.2": {
        **_V3,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "quantization_config": {**_FP8, "scale_fmt": "ue8m0"},
    },
    "Kimi-K2": {
        **_ALIKE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.827,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        # beta_fast equals beta_slow: no pair of dimensions lies between fast and slow.
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 131072,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "quantization_config": _FP8,
    },
    "Moonlight-16B-A3B": {
        **_ALIKE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.446,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 8192,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
    },
    "JoyAI-LLM-Flash": {
        **_ALIKE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "joyai_llm_flash",
        "vocab_size": 129280,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "intermediate_size": 7168,
        "moe_intermediate_size": 768,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 32000000,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "GLM-4.7-Flash": {
        **_ALIKE,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "mlp_layer_types": ["dense"] + ["sparse"] * 46,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 202752,
        "num_nextn_predict_layers": 1,
        "bos_token_id": None,
        "eos_token_id": [154820, 154827, 154829],
    },
    "GigaChat3-10B-A1.8B": {
        **_ALIKE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 128256,
        "hidden_size": 1536,
        "num_hidden_layers": 26,
        "intermediate_size": 8960,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "v_head_dim": 192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0,
        "max_position_embeddings": 262144,
        "num_nextn_predict_layers": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
for _name in ("JoyAI-LLM-Flash", "GLM-4.7-Flash"):
    # These two files omit moe_layer_freq. GLM's omits two more fields: it has mlp_layer_types instead
    # of first_k_dense_replace.
    del CONFIGS[_name]["moe_layer_freq"]
del CONFIGS["GLM-4.7-Flash"]["first_k_dense_replace"]
del CONFIGS["GLM-4.7-Flash"]["scoring_func"]

_DIVISORS = {
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    # With few indexer heads, all heads may score 0 at many positions; among equal scores torch.topk,
    # which transformers calls, takes any.
    "index_n_heads": 4,
    "index_head_dim": 5,
    "index_topk": 128,
}


def small(name: str) -> dict[str, Any]:
    """Return the model's config with reduced dimensions, heads, layers, context and scale blocks, and
    with 0 and 1 as begin and end ids; all other fields are unchanged.
    """
    config = dict(CONFIGS[name])
    for field, divisor in _DIVISORS.items():
        if config.get(field) is not None:
            config[field] = max(config[field] // divisor, 8)
    num_heads = 4 if config["num_attention_heads"] % 5 else 5
    config |= {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "num_hidden_layers": config.get("first_k_dense_replace", 1) + 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][: config["num_hidden_layers"]]
    if config["rope_scaling"] is not None:
        config["rope_scaling"] = {
            **config["rope_scaling"],
            "original_max_position_embeddings": 64,
        }
    if config.get("quantization_config") is not None:
        config["quantization_config"] = {
            **config["quantization_config"],
            "weight_block_size": [16, 16],
        }
    return config
